"""`odc-mpi watch`: follow a run in the terminal. Does not use MPI."""

import argparse
from functools import partial

from odc_mpi.cli.options import as_path

HELP = "follow a run: loss or rewards, idle time, time left"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `odc-mpi watch`."""
    parser.description = (
        "Show loss or rewards, idle time and time left of a run, from the files in its directory, until it ends: on a "
        "terminal as a block that is redrawn, elsewhere as a line per step. Does not need MPI."
    )
    parser.add_argument("run", type=as_path, metavar="RUN", help="run directory")
    parser.add_argument("--wait", type=float, default=600.0, metavar="S", help="seconds to wait for its start (600)")


def run(arguments: argparse.Namespace) -> int:
    """Follow a run until it ends, and return the exit code."""
    from odc_mpi.observe.watch import watch
    from odc_mpi.training.rundir.run_dir_lock import is_held

    watch(arguments.run, partial(is_held, arguments.run), arguments.wait)
    return 0

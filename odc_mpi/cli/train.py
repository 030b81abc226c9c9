"""`odc-mpi train`: its options and its run. What is set beyond the file are settings of `train.settings`."""

import argparse
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from odc_mpi.errors import UserError
from odc_mpi.runtime.ranks import gc_paused, mpi_startup, run_on_all_ranks
from odc_mpi.runtime.start.launch import launched_rank

if TYPE_CHECKING:
    from odc_mpi.training.settings import Config

HELP = "train a model; under mpiexec on all its ranks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.usage = "odc-mpi train [--config FILE] [--SECTION.KEY VALUE ...]"
    parser.description = "Settings come from the file; those on the command line win."
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with the settings")
    parser.add_argument("-h", "--help", action="store_true", help="show all settings and exit")


def run(arguments: argparse.Namespace) -> int:
    """Train, and return the exit code. Collective.

    Raises:
        UserError: A setting is wrong; nothing was written.
    """
    if arguments.help:
        from odc_mpi.training import settings

        print("usage: odc-mpi train [--config FILE] [--SECTION.KEY VALUE ...]\n\n" + settings.help_text())
        return 0
    from odc_mpi.observe.rank_log import RankLog
    from odc_mpi.training.stop import StopRequest

    # From here on: a scheduler may want the end of a run that has hardly begun, and libraries warn when imported.
    with StopRequest() as stop, RankLog(launched_rank()) as log:
        loaded = _load(arguments)
        # Not before here: torch and transformers take seconds, for which nobody needs to wait who made a mistake. In
        # this order: the last starts MPI, and a rank that fails to import anything after that would leave the others
        # waiting.
        if not isinstance(loaded, UserError):
            with gc_paused():
                importlib.import_module("odc_mpi.models.build")
        with mpi_startup():
            from odc_mpi.runtime.world import World

        # With mistaken settings ranks meet only to hear so.
        world = World() if isinstance(loaded, UserError) else World(timeout_s=loaded.comm.timeout_s)

        def start() -> None:
            config = world.run_on_all(lambda: _unwrap(loaded))
            from odc_mpi.training.run import train

            world.run_on_all(lambda: log.open(config.run.log_dir, world))
            train(config, world, stop)

        return run_on_all_ranks(world, start)


def _load(arguments: argparse.Namespace) -> "Config | UserError":
    """Read the settings once, as they may come from a pipe; return this rank's mistake, of which all are to hear."""
    from odc_mpi.training import settings

    try:
        return settings.load(arguments.config, arguments.overrides)
    except UserError as mistake:
        return mistake


def _unwrap(loaded: "Config | UserError") -> "Config":
    if isinstance(loaded, UserError):
        raise loaded
    return loaded

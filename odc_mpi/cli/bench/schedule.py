"""`odc-mpi bench schedule`, schedules on the real runtime: its options and its run."""

import argparse
from dataclasses import replace

from odc_mpi.cli.bench.under_mpiexec import measure_on_ranks
from odc_mpi.cli.options import step_seconds
from odc_mpi.cli.scenario import RANKS, add_scenario, scenario_of

HELP = "windows, collectives and tickets on many ranks, with sleeps in place of computation"
DESCRIPTION = "Speed-ups of windows over collectives on the real runtime."
_STEP_S = "seconds an even share of a minibatch is scaled to"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. Local."""
    parser.add_argument("--ranks", type=int, metavar="N", help=f"to start; default: {RANKS}, or mpiexec's")
    add_scenario(parser, {"--minibatches": 10, "--units": 4})
    parser.add_argument("--step-s", type=step_seconds, default=1.0, metavar="X", help=f"{_STEP_S}; default: 1")


def run(arguments: argparse.Namespace) -> int:
    """Measure on all ranks, and return the exit code. Collective, under mpiexec.

    Raises:
        UserError: An option is wrong.
    """
    scenario = scenario_of(arguments)
    return measure_on_ranks(
        arguments,
        scenario.ranks,
        "odc_mpi.bench.schedule",
        lambda schedule, world, say: schedule.measure(
            world, world.agree(lambda: replace(scenario, ranks=world.size)), arguments.step_s, say
        ),
    )

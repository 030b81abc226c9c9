"""`odc-mpi bench schedule`, schedules on the real runtime: its options and its run."""

import argparse
from dataclasses import replace

from odc_mpi.cli.bench.under_mpiexec import check_ranks, start_ranks, world_of
from odc_mpi.cli.imports import no_collections
from odc_mpi.cli.options import step_seconds
from odc_mpi.cli.scenario import RANKS, add_scenario, scenario_of
from odc_mpi.runtime.launch import is_launched
from odc_mpi.runtime.ranks import on_ranks, start_of_mpi

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
    if not is_launched():
        return start_ranks(arguments, scenario.ranks)
    # Not before here, and MPI last: see `odc_mpi.cli.train`.
    with no_collections(), start_of_mpi():
        from odc_mpi.bench import run_schedule

    world = world_of(arguments)

    def work() -> None:
        check_ranks(arguments, world)
        here = world.agree(lambda: replace(scenario, ranks=world.size))
        run_schedule.run(world, here, arguments.step_s, arguments.json)

    return on_ranks(world, work)

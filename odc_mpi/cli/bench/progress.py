"""`odc-mpi bench progress`, progress threads: its options and its run."""

import argparse

from odc_mpi.cli.bench.under_mpiexec import add_rounds, check_ranks, start_ranks, world_of
from odc_mpi.cli.imports import no_collections
from odc_mpi.cli.options import positive
from odc_mpi.errors import UserError
from odc_mpi.runtime.launch import is_launched
from odc_mpi.runtime.ranks import on_ranks, start_of_mpi

HELP = "reading from and pushing to ranks that compute, and what serving costs them"
DESCRIPTION = "What the progress thread achieves and costs."
#: Sizes that are read and pushed.
GET_SIZES, PUSH_SIZES = "64,1M,16M", "512K,2M,8M,32M"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. Local."""
    for option, what, default in (("--sizes", "Gets", GET_SIZES), ("--push-sizes", "pushes", PUSH_SIZES)):
        parser.add_argument(option, default=default, metavar="LIST", help=f"of {what}; default: {default}")
    add_rounds(parser, 9)
    parser.add_argument(
        "--budget-s", type=positive, default=10, metavar="X", help="for the pushes of a size by one way; default: 10"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure on all ranks, and return the exit code. Collective, under mpiexec.

    Raises:
        UserError: An option is wrong.
    """
    from odc_mpi.bench.measure import parse_sizes

    sizes, push_sizes = parse_sizes(arguments.sizes), parse_sizes(arguments.push_sizes, "--push-sizes")
    if arguments.ranks == 1:
        raise UserError("--ranks 1: expected two or more, of which one computes")
    if not is_launched():
        return start_ranks(arguments, arguments.ranks or 2)
    # Not before here, and MPI last: see `odc_mpi.cli.train`.
    with no_collections(), start_of_mpi():
        from odc_mpi.bench.progress import run as progress_command

    world = world_of(arguments)

    def work() -> None:
        check_ranks(arguments, world)
        progress_command.run(world, sizes, push_sizes, arguments.repeats, arguments.budget_s, arguments.json)

    return on_ranks(world, work)

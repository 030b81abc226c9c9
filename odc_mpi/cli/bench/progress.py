"""`odc-mpi bench progress`, progress threads: its options and its run."""

import argparse

from odc_mpi.cli.bench.under_mpiexec import add_rounds, measure_on_ranks
from odc_mpi.cli.options import positive
from odc_mpi.errors import UserError

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
    return measure_on_ranks(
        arguments,
        arguments.ranks or 2,
        "odc_mpi.bench.progress.benchmark",
        lambda progress, world, say: progress.measure(
            world, sizes, push_sizes, arguments.repeats, arguments.budget_s, say
        ),
    )

"""`odc-mpi bench transport`, fetches and pushes: its options and its run."""

import argparse

from odc_mpi.cli.bench.under_mpiexec import add_rounds, measure_on_ranks

HELP = "fetches and pushes beside memcpy, MPI's collectives and gloo"
DESCRIPTION = "GB/s of fetching units and pushing gradients."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. Local."""
    parser.add_argument("--sizes", metavar="LIST", help="of units, such as 64K,1M,256M; default: 64K to 256M")
    add_rounds(parser, 7)


def run(arguments: argparse.Namespace) -> int:
    """Measure on all ranks, and return the exit code. Collective, under mpiexec.

    Raises:
        UserError: An option is wrong.
    """
    from odc_mpi.bench.measure import DEFAULT_SIZES, parse_sizes

    sizes = parse_sizes(DEFAULT_SIZES if arguments.sizes is None else arguments.sizes)
    return measure_on_ranks(
        arguments,
        arguments.ranks or 2,
        "odc_mpi.bench.transport",
        lambda transport, world, say: transport.measure(world, sizes, arguments.repeats, say),
    )

"""`odc-mpi bench transport`, fetches and pushes: its options and its run."""

import argparse
import json

from odc_mpi.cli.bench.under_mpiexec import add_rounds, check_ranks, start_ranks, world_of
from odc_mpi.cli.imports import no_collections
from odc_mpi.runtime.launch import is_launched
from odc_mpi.runtime.ranks import on_ranks, start_of_mpi

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
    from odc_mpi.bench.measure import DEFAULT_SIZES, parse_sizes, speaker

    sizes = parse_sizes(DEFAULT_SIZES if arguments.sizes is None else arguments.sizes)
    if not is_launched():
        return start_ranks(arguments, arguments.ranks or 2)
    # Not before here, and MPI last: see `odc_mpi.cli.train`.
    from odc_mpi.bench.transport_tables import transport_tables
    from odc_mpi.observe.terminal import make_console

    with no_collections(), start_of_mpi():
        from odc_mpi.bench.transport import measure

    world = world_of(arguments)

    def work() -> None:
        check_ranks(arguments, world)
        result = measure(world, sizes, arguments.repeats, speaker(world.rank))
        if world.rank == 0 and arguments.json:
            print(json.dumps(result), flush=True)
        elif world.rank == 0:
            make_console().print(transport_tables(result))

    return on_ranks(world, work)

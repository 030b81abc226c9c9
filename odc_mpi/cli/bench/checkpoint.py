"""`odc-mpi bench checkpoint`, checkpoints: its options and its run."""

import argparse
import json
from pathlib import Path

from odc_mpi.cli.bench.under_mpiexec import add_rounds, check_ranks, start_ranks, world_of
from odc_mpi.cli.imports import no_collections
from odc_mpi.runtime.launch import is_launched
from odc_mpi.runtime.ranks import on_ranks, start_of_mpi

HELP = "checkpoints beside plain files and torch.distributed.checkpoint"
DESCRIPTION = "GB/s of writing and reading, and the pause of the training."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. Local."""
    parser.add_argument("--size", default="1G", metavar="SIZE", help="of the state of all ranks; default: 1G")
    parser.add_argument("--dir", type=Path, default=Path(), metavar="DIR", help="on the disk that is meant; default: .")
    add_rounds(parser, 5)


def run(arguments: argparse.Namespace) -> int:
    """Measure on all ranks, and return the exit code. Collective, under mpiexec.

    Raises:
        UserError: An option is wrong.
    """
    from odc_mpi.bench.measure import parse_sizes

    size = parse_sizes(arguments.size)[0]
    if not is_launched():
        return start_ranks(arguments, arguments.ranks or 2)
    # Not before here, and MPI last: see `odc_mpi.cli.train`.
    with no_collections(), start_of_mpi():
        from odc_mpi.bench.checkpoint import measure, report

    world = world_of(arguments)

    def work() -> None:
        check_ranks(arguments, world)
        result = measure(world, size, arguments.repeats, arguments.dir)
        if world.rank == 0:
            print(json.dumps(result) if arguments.json else report(result), flush=True)

    return on_ranks(world, work)

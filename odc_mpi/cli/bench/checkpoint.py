"""`odc-mpi bench checkpoint`, checkpoints: its options and its run."""

import argparse
from pathlib import Path

from odc_mpi.cli.bench.under_mpiexec import add_rounds, measure_on_ranks

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
    return measure_on_ranks(
        arguments,
        arguments.ranks or 2,
        "odc_mpi.bench.checkpoint",
        lambda checkpoint, world, _: checkpoint.measure(world, size, arguments.repeats, arguments.dir),
    )

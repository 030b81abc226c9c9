"""`odc-mpi bench train`, training in every way: its options and its run."""

import argparse
import importlib
from pathlib import Path

from odc_mpi.cli.bench.under_mpiexec import add_rounds, check_ranks, start_ranks, world_of
from odc_mpi.cli.imports import no_collections
from odc_mpi.cli.options import positive
from odc_mpi.runtime.launch import is_launched
from odc_mpi.runtime.ranks import on_ranks, start_of_mpi

HELP = "training with windows beside FSDP2, collectives and a single process"
DESCRIPTION = "Tokens per second of every way to train."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. Local."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="of odc-mpi train; default: a small model")
    parser.add_argument("--steps", type=positive, default=4, metavar="N", help="minibatches of a round; default: 4")
    add_rounds(parser, 7)


def run(arguments: argparse.Namespace) -> int:
    """Measure on all ranks, and return the exit code. Collective, under mpiexec.

    Raises:
        UserError: An option is wrong.
    """
    if not is_launched():
        return start_ranks(arguments, arguments.ranks or 2)
    # Not before here, and MPI last: see `odc_mpi.cli.train`.
    with no_collections():
        importlib.import_module("odc_mpi.models.build")
    with no_collections(), start_of_mpi():
        from odc_mpi.bench import run_train

    world = world_of(arguments)

    def work() -> None:
        check_ranks(arguments, world)
        run_train.run(world, arguments.config, arguments.steps, arguments.repeats, arguments.json)

    return on_ranks(world, work)

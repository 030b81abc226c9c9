"""`odc-mpi bench train`, training in every way: its options and its run."""

import argparse
import importlib
from pathlib import Path

from odc_mpi.cli.bench.under_mpiexec import add_rounds, measure_on_ranks
from odc_mpi.cli.imports import no_collections
from odc_mpi.cli.options import positive
from odc_mpi.runtime.launch import is_launched

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
    if is_launched():  # a library that fails to load does so before MPI starts
        with no_collections():
            importlib.import_module("odc_mpi.models.build")
    return measure_on_ranks(
        arguments,
        arguments.ranks or 2,
        "odc_mpi.bench.train",
        lambda train, world, say: train.measure(
            world, train.configuration(world, arguments.config, say), arguments.steps, arguments.repeats, say
        ),
    )

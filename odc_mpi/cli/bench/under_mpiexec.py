"""What all benchmarks ask of their ranks: how many, how often, how long; and the mpiexec that starts them."""

import argparse
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from odc_mpi.cli import mpiexec
from odc_mpi.cli.imports import no_collections
from odc_mpi.cli.options import positive
from odc_mpi.errors import AgreedError
from odc_mpi.runtime.launch import is_launched
from odc_mpi.runtime.ranks import on_ranks, say, start_of_mpi

if TYPE_CHECKING:
    from odc_mpi.runtime.world import World

#: Tells a person what is measured next.
Say = Callable[[str], None]


def add_rounds(parser: argparse.ArgumentParser, repeats: int) -> None:
    """Add the options of a benchmark that is measured in rounds. Local."""
    parser.add_argument("--repeats", type=positive, default=repeats, metavar="N", help=f"rounds; default: {repeats}")
    parser.add_argument("--ranks", type=positive, metavar="N", help="to start; default: 2, or mpiexec's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that starts mpiexec itself. Local."""
    parser.add_argument(
        "--timeout-s", type=positive, default=900, metavar="SECONDS", help="until all ends; default: 900"
    )


def start_ranks(arguments: argparse.Namespace, ranks: int) -> int:
    """Run the same command, word for word, on some ranks under mpiexec, and return the exit code. Local."""
    try:
        return mpiexec.run(ranks, arguments.words, timeout_s=arguments.timeout_s)
    except TimeoutError as error:
        say(error)
        return 1


def measure_on_ranks(
    arguments: argparse.Namespace, ranks: int, module: str, measure: "Callable[[Any, World, Say], Mapping[str, Any]]"
) -> int:
    """Start the ranks, or as one of them measure and let rank 0 print; return the exit code. Collective, under mpiexec.

    Args:
        arguments: Of the command line.
        ranks: How many to start.
        module: The benchmark, imported by the ranks alone.
        measure: Called with that module, the ranks and a function that tells a person what is measured next; returns
            the benchmark's object.
    """
    if not is_launched():
        return start_ranks(arguments, ranks)
    from odc_mpi.bench.measure import show, speaker

    # Not before here, and MPI last: see `odc_mpi.cli.train`.
    with no_collections(), start_of_mpi():
        benchmark = importlib.import_module(module)
        from odc_mpi.runtime.world import World

    # A single wait may last as long as all of it, since a round of some does.
    world = World(timeout_s=arguments.timeout_s, limit="--timeout-s")

    def work() -> None:
        if arguments.ranks not in (None, world.size):
            raise AgreedError(f"--ranks {arguments.ranks}: mpiexec started {world.size}, leave --ranks out under it")
        result = measure(benchmark, world, speaker(world.rank))
        if world.rank == 0:
            show(result, arguments.json)

    return on_ranks(world, work)

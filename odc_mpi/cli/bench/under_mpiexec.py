"""What all benchmarks ask of their ranks: how many, how often, how long; and the mpiexec that starts them."""

import argparse
from typing import TYPE_CHECKING

from odc_mpi.cli import mpiexec
from odc_mpi.cli.options import positive
from odc_mpi.errors import AgreedError
from odc_mpi.runtime.ranks import say

if TYPE_CHECKING:
    from odc_mpi.runtime.world import World


def add_rounds(parser: argparse.ArgumentParser, repeats: int) -> None:
    """Add the options of a benchmark that is measured in rounds. Local."""
    parser.add_argument("--repeats", type=positive, default=repeats, metavar="N", help=f"rounds; default: {repeats}")
    parser.add_argument("--ranks", type=positive, metavar="N", help="to start; default: 2, or mpiexec's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """Add what is asked of a command that starts mpiexec itself."""
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


def world_of(arguments: argparse.Namespace) -> "World":
    """Return the world of a benchmark: a single wait may last as long as all of it, since a round of some does."""
    from odc_mpi.runtime.world import World

    return World(timeout_s=arguments.timeout_s, limit="--timeout-s")


def check_ranks(arguments: argparse.Namespace, world: "World") -> None:
    """Check that mpiexec started as many ranks as were asked for. Local.

    Raises:
        AgreedError: It started another number; on every rank.
    """
    if arguments.ranks not in (None, world.size):
        raise AgreedError(f"--ranks {arguments.ranks}: mpiexec started {world.size}, leave --ranks out under it")

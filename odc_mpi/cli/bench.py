"""`odc-mpi bench`: the benchmarks, each with its options and its run.

Each starts mpiexec where it is not under it, and measures on all ranks. What measures is imported by the ranks alone.
"""

import argparse
import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from odc_mpi.bench.measure import DEFAULT_SIZES, make_progress_printer, parse_sizes, print_result
from odc_mpi.cli import mpiexec
from odc_mpi.cli.options import positive_int, step_seconds
from odc_mpi.cli.scenario_options import add_scenario, build_scenario
from odc_mpi.errors import AllRanksUserError
from odc_mpi.runtime.ranks import gc_paused, mpi_startup, print_error, run_on_all_ranks
from odc_mpi.runtime.start.launch import is_launched
from odc_mpi.simulate.options import LENGTHS, RANKS

if TYPE_CHECKING:
    from odc_mpi.runtime.world import World

HELP = "measure what this machine achieves"

#: Prints what is measured next.
ProgressPrinter = Callable[[str], None]


class Benchmark(NamedTuple):
    """A benchmark: its line of the help, what adds its options, and what measures and returns the exit code."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks and their options."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, benchmark in BENCHMARKS.items():
        description = f"Measure {benchmark.help}. Starts mpiexec if it is not under it."
        one = benchmarks.add_parser(name, help=benchmark.help, description=description, allow_abbrev=False)
        benchmark.add_arguments(one)
        one.add_argument(
            "--timeout-s", type=positive_int, default=900, metavar="SECONDS", help="until all ends; default: 900"
        )


def run(arguments: argparse.Namespace) -> int:
    """Run a benchmark and return the exit code. Collective, under mpiexec.

    Raises:
        UserError: An option is wrong.
    """
    return BENCHMARKS[arguments.benchmark].run(arguments)


def _add_rounds(parser: argparse.ArgumentParser, repeats: int) -> None:
    parser.add_argument(
        "--repeats", type=positive_int, default=repeats, metavar="N", help=f"rounds; default: {repeats}"
    )
    parser.add_argument("--ranks", type=positive_int, metavar="N", help="to start; default: 2, or mpiexec's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _measure_on_ranks(
    arguments: argparse.Namespace,
    module: str,
    measure: "Callable[[Any, World, ProgressPrinter], Mapping[str, Any]]",
    ranks: int | None = None,
) -> int:
    """Start the ranks, or as one of them measure and let rank 0 print; return the exit code. Collective, under mpiexec.

    Args:
        arguments: Of the command line.
        module: The benchmark, imported by the ranks alone.
        measure: Called with that module, the ranks and a function that prints what is measured next; returns
            the benchmark's object.
        ranks: How many to start; None for `--ranks`, or 2.
    """
    if not is_launched():
        try:
            return mpiexec.run(ranks or arguments.ranks or 2, arguments.words, timeout_s=arguments.timeout_s)
        except TimeoutError as error:
            print_error(error)
            return 1
    # Not before here, and MPI last: see `odc_mpi.cli.train`.
    with gc_paused(), mpi_startup():
        benchmark = importlib.import_module(module)
        from odc_mpi.runtime.world import World

    # A single wait may last as long as all of it, since a round of some does.
    world = World(timeout_s=arguments.timeout_s, limit="--timeout-s")

    def work() -> None:
        if arguments.ranks not in (None, world.size):
            raise AllRanksUserError(
                f"--ranks {arguments.ranks}: mpiexec started {world.size}, leave --ranks out under it"
            )
        result = measure(benchmark, world, make_progress_printer(world.rank))
        if world.rank == 0:
            print_result(result, arguments.json)

    return run_on_all_ranks(world, work)


def _add_transport(parser: argparse.ArgumentParser) -> None:
    meaning = "of units, such as 64K,1M,256M; default: 64K to 256M"
    parser.add_argument("--sizes", default=DEFAULT_SIZES, metavar="LIST", help=meaning)
    _add_rounds(parser, 7)


def _run_transport(arguments: argparse.Namespace) -> int:
    sizes = parse_sizes(arguments.sizes)
    return _measure_on_ranks(
        arguments,
        "odc_mpi.bench.transport",
        lambda transport, world, say: transport.measure(world, sizes, arguments.repeats, say),
    )


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, metavar="N", help=f"to start; default: {RANKS.default}, or mpiexec's")
    parser.add_argument("--lengths", metavar="NAME", help=f"{LENGTHS}; default: longalign")
    add_scenario(parser, num_minibatches=10, num_units=4)
    meaning = "seconds an even share of a minibatch is scaled to; default: 1"
    parser.add_argument("--step-s", type=step_seconds, default=1.0, metavar="X", help=meaning)


def _run_schedule(arguments: argparse.Namespace) -> int:
    from odc_mpi.simulate.scenario import Scenario

    scenario = build_scenario(arguments, Scenario)

    def measure(schedule: Any, world: "World", say: ProgressPrinter) -> Any:
        resized = world.run_on_all(lambda: replace(scenario, ranks=world.size))
        return schedule.measure(world, resized, arguments.step_s, say)

    return _measure_on_ranks(arguments, "odc_mpi.bench.schedule", measure, scenario.ranks)


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="of odc-mpi train; default: a small model")
    parser.add_argument("--steps", type=positive_int, default=4, metavar="N", help="minibatches of a round; default: 4")
    parser.add_argument("--model", choices=("qwen2", "llama"), default="qwen2", help="without --config; default: qwen2")
    parser.add_argument("--no-caches", action="store_true", help="fetch and push anew in each microbatch")
    parser.add_argument("--exact", action="store_true", help="with run.exact besides, for what it costs")
    _add_rounds(parser, 7)


def _run_train(arguments: argparse.Namespace) -> int:
    if is_launched():  # a library that fails to load does so before MPI starts
        with gc_paused():
            importlib.import_module("odc_mpi.models.build")
    return _measure_on_ranks(
        arguments,
        "odc_mpi.bench.train",
        lambda train, world, say: train.measure(
            world,
            train.configuration(world, arguments.config, say, arguments.model, caches=not arguments.no_caches),
            arguments.steps,
            arguments.repeats,
            say,
            exact=arguments.exact,
        ),
    )


#: In the order of the help.
BENCHMARKS = {
    "transport": Benchmark(
        "fetches and pushes beside memcpy, MPI's collectives and gloo", _add_transport, _run_transport
    ),
    "schedule": Benchmark(
        "windows, collectives and tickets on many ranks, with sleeps in place of computation",
        _add_schedule,
        _run_schedule,
    ),
    "train": Benchmark("training with windows beside FSDP2, collectives and processes apart", _add_train, _run_train),
}

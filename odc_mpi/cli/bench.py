"""`odc-mpi bench`: run a benchmark.

Unless it already runs under mpiexec, the command starts mpiexec. Only the ranks import the module of the benchmark in
`odc_mpi.bench`.
"""

import argparse
import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from odc_mpi.bench.measure import DEFAULT_SIZES, make_progress_printer, parse_sizes, print_result
from odc_mpi.cli import mpiexec
from odc_mpi.cli.options import add_scenario, as_path, build_scenario, positive_int, step_seconds
from odc_mpi.errors import AllRanksUserError, UserError
from odc_mpi.runtime.ranks import gc_paused, mpi_startup, print_error, run_on_all_ranks
from odc_mpi.runtime.start.launch import is_launched
from odc_mpi.simulate.options import ScenarioOptions

if TYPE_CHECKING:
    from odc_mpi.runtime.world import World

HELP = "benchmark communication, schedules and training"

#: Function that measures on all ranks. Its arguments are the benchmark's module in `odc_mpi.bench`, the world, and a
#: function that prints a line about the progress.
Measure: TypeAlias = "Callable[[Any, World, Callable[[str], None]], Mapping[str, Any]]"


class Benchmark(NamedTuple):
    """Benchmark subcommand. Outside mpiexec, `ranks` ranks are started by default.

    `prepare` checks the arguments and returns the function that measures.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    prepare: Callable[[argparse.Namespace], Measure]
    ranks: int = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand per benchmark, each with its options."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, benchmark in BENCHMARKS.items():
        description = f"Measure {benchmark.help}. Outside mpiexec, it starts mpiexec."
        one = benchmarks.add_parser(name, help=benchmark.help, description=description, allow_abbrev=False)
        benchmark.add_arguments(one)
        one.add_argument("--timeout-s", type=positive_int, default=900, metavar="S", help="time limit; default: 900")


def run(arguments: argparse.Namespace) -> int:
    """Run the selected benchmark and return the exit code. Collective under mpiexec; otherwise, mpiexec is started."""
    selected = BENCHMARKS[arguments.benchmark]
    measure = selected.prepare(arguments)
    if not is_launched():
        try:
            return mpiexec.run(arguments.ranks or selected.ranks, arguments.argv, timeout_s=arguments.timeout_s)
        except TimeoutError as error:
            print_error(error)
            return 1
    # Imported late, and MPI last: see `odc_mpi.cli.train`.
    with gc_paused(), mpi_startup():
        module = importlib.import_module(f"odc_mpi.bench.{arguments.benchmark}")
        from odc_mpi.runtime.world import World

    # In some benchmarks, a rank waits for a full round, so the deadline is the time limit of the benchmark.
    world = World(timeout_s=arguments.timeout_s, limit="--timeout-s")

    def work() -> None:
        if arguments.ranks not in (None, world.size):
            raise AllRanksUserError(f"--ranks {arguments.ranks}: mpiexec started {world.size} ranks: remove --ranks")
        result = measure(module, world, make_progress_printer(world.rank))
        if world.rank == 0:
            print_result(result, arguments.json)

    return run_on_all_ranks(world, work)


def _add_rounds(parser: argparse.ArgumentParser, repeats: int) -> None:
    parser.add_argument("--repeats", type=positive_int, default=repeats, metavar="N", help=f"default: {repeats}")
    parser.add_argument("--ranks", type=positive_int, metavar="N", help="ranks to start; default: 2")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_transport(parser: argparse.ArgumentParser) -> None:
    help_text = "unit sizes in bytes, such as 64K,1M,256M; default: 64K to 256M"
    parser.add_argument("--sizes", default=DEFAULT_SIZES, metavar="LIST", help=help_text)
    _add_rounds(parser, 7)


def _prepare_transport(arguments: argparse.Namespace) -> Measure:
    sizes = parse_sizes(arguments.sizes)
    return lambda transport, world, progress: transport.measure(world, sizes, arguments.repeats, progress)


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    add_scenario(parser, num_minibatches=10, num_units=4)
    parser.set_defaults(ranks=None)  # under mpiexec, its ranks
    help_text = "seconds of a perfectly balanced minibatch, to which all times are scaled; default: 1"
    parser.add_argument("--step-s", type=step_seconds, default=1.0, metavar="X", help=help_text)


def _prepare_schedule(arguments: argparse.Namespace) -> Measure:
    scenario = build_scenario(arguments)
    if scenario.num_islands > 1:
        raise UserError(f"--islands: expected 1, got {scenario.num_islands}: odc-mpi simulate --islands simulates them")

    def measure(schedule: Any, world: "World", progress: Callable[[str], None]) -> Any:
        resized = world.run_on_all(lambda: replace(scenario, ranks=world.size))
        return schedule.measure(world, resized, arguments.step_s, progress)

    return measure


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=as_path, metavar="FILE", help="as for odc-mpi train; default: a small model")
    parser.add_argument("--steps", type=positive_int, default=4, metavar="N", help="minibatches per round; default: 4")
    parser.add_argument("--exact", action="store_true", help="measure the cost of run.exact, too")
    _add_rounds(parser, 7)


def _prepare_train(arguments: argparse.Namespace) -> Measure:
    if is_launched():  # a library that cannot be loaded must fail before MPI starts
        with gc_paused():
            importlib.import_module("odc_mpi.models.build")

    def measure(train: Any, world: "World", progress: Callable[[str], None]) -> Any:
        config = train.configuration(world, arguments.config, progress)
        return train.measure(world, config, arguments.steps, arguments.repeats, progress, exact=arguments.exact)

    return measure


_SCHEDULE = "windows, collectives and tickets, with sleeps in place of computation"
BENCHMARKS = {
    "transport": Benchmark("fetches and pushes against memcpy and collectives", _add_transport, _prepare_transport),
    "schedule": Benchmark(_SCHEDULE, _add_schedule, _prepare_schedule, ScenarioOptions.ranks),
    "train": Benchmark("training with windows against FSDP2", _add_train, _prepare_train),
}

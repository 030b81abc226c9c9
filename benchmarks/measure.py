"""Functions shared by the programs: options, interleaved rounds, times of the slowest rank, ratios, sizes, output."""

import argparse
import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from time import perf_counter
from typing import Any, TypeAlias, TypeVar

from odc_mpi.cli.options import positive_int
from odc_mpi.errors import UserError
from odc_mpi.formatting import parse_size
from odc_mpi.runtime.ranks import print_error, run_on_all_ranks
from odc_mpi.runtime.start.launch import launched_rank
from odc_mpi.runtime.world import World
from odc_mpi.simulate.events import quartiles

T = TypeVar("T")

#: Default value of `--sizes`.
DEFAULT_SIZES = "64K,256K,1M,4M,16M,64M,256M"
#: Function that measures on all ranks, and returns the JSON object of a program. Its second argument is a function that
#: prints a line about the progress. Collective.
Measure: TypeAlias = Callable[[World, Callable[[str], None]], Mapping[str, Any]]


def run_program(parser: argparse.ArgumentParser, prepare: Callable[[argparse.Namespace], Measure]) -> int:
    """Parse the command line, measure, print the result on rank 0, and return the exit code of a program. Collective.

    `prepare` checks the parsed options, and returns the function that measures. `--json` and `--timeout-s` are added.
    """
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    # In some programs, a rank waits for a full round, so this is also the time limit of a wait.
    parser.add_argument(
        "--timeout-s", type=positive_int, default=900, metavar="S", help="time limit of a wait; default: 900"
    )
    try:
        arguments = parser.parse_args()
        measure = prepare(arguments)
    except UserError as error:  # every rank has the same error: only one prints it
        if launched_rank() == 0:
            print_error(error)
        return 2
    gc.freeze()  # otherwise, collecting all imported objects takes 0.2 s, at a different time on every rank
    world = World(timeout_s=arguments.timeout_s, limit="--timeout-s")

    def work() -> None:
        result = measure(world, make_progress_printer(world.rank))
        if world.rank == 0:
            print_result(result, arguments.json)

    return run_on_all_ranks(world, work)


def interleaved(
    variants: Mapping[str, Callable[[], T]],
    repeats: int,
    on_call: Callable[[int, str], None] = lambda round_number, name: None,
) -> dict[str, list[T]]:
    """Call every variant once per round, so that a temporary slowdown of the machine affects all variants alike.

    The variant that begins changes from round to round, because it may find caches in a different state. `on_call` is
    called before each variant with the index of the round and the name. Returns each variant's results by round.
    """
    results: dict[str, list[T]] = {name: [] for name in variants}
    for round_number in range(repeats):
        for name in rotate(list(variants), round_number):
            on_call(round_number, name)
            results[name].append(variants[name]())
    return results


def rotate(names: Sequence[str], count: int) -> list[str]:
    """Return a copy of `names`, rotated left by `count` positions."""
    first = count % len(names)
    return [*names[first:], *names[:first]]


def seconds(operations: Sequence[Callable[[], object]], times: int, finish: Callable[[], object]) -> float:
    """Cycle through `operations` for `times` calls in total, call `finish`, and return the mean seconds per call."""
    row = list(islice(cycle(operations), times))
    start = perf_counter()
    for operation in row:
        operation()
    finish()
    return (perf_counter() - start) / times


def header(world: World, benchmark: str, load: float, **fields: Any) -> dict[str, Any]:
    """Return entries common to benchmark results, plus `fields`. `load` is the load average before the benchmark."""
    return {
        "benchmark": benchmark,
        "library": world.mpi_library,
        "ranks": world.size,
        "nodes": world.num_nodes,
        **fields,
        "load_average": [load, os.getloadavg()[0]],
    }


def slowest_s(world: World, what: str, work: Callable[[], object]) -> float:
    """Call `work` on all ranks, and return the slowest rank's time in seconds. Collective.

    `what` describes the work in error messages.
    """
    world.wait_collective(world.comm.Ibarrier(), f"beginning {what} together")
    began = perf_counter()
    work()
    seconds = perf_counter() - began
    world.wait_collective(world.comm.Ibarrier(), f"ending {what}")
    return max(world.gather_objects(seconds))


def slowest(world: World, times: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the time of the slowest rank for each variant and round, from the `times` of every rank. Collective."""
    ranks = world.gather_objects(times)
    return {name: [max(one) for one in zip(*(rank[name] for rank in ranks), strict=True)] for name in times}


def entries(
    times: Mapping[str, Sequence[float]], num_bytes: int, **references: Callable[[str], str | None]
) -> dict[str, dict[str, Any]]:
    """Return one entry per variant for a benchmark's JSON object.

    `times` contains the seconds per operation on `num_bytes` bytes, by variant and round. Each entry contains the
    quartiles of `seconds` and `gb_per_s` and, for each key of `references`, the median speed relative to a reference
    variant, or None if there is none. The functions in `references` convert a variant's name to that of its reference.
    """

    def relative_speed(name: str, other: str | None) -> float | None:
        return ratio(times[other], times[name]) if other and other in times else None

    return {
        name: {
            "seconds": quartiles(times_of_variant),
            "gb_per_s": quartiles([num_bytes / one / 1e9 for one in times_of_variant]),
            **{key: relative_speed(name, reference(name)) for key, reference in references.items()},
        }
        for name, times_of_variant in times.items()
    }


def ratio(reference: Sequence[float], times: Sequence[float]) -> float:
    """Return the speed relative to a reference: the median, over all rounds, of `reference` divided by `times`."""
    return statistics.median(a / b for a, b in zip(reference, times, strict=False))


def print_result(result: Mapping[str, Any], as_json: bool) -> None:
    """Print a result as tables or, if `as_json` or there is no report on it, as one line of JSON. Only on rank 0."""
    # Imported late, since other ranks do not need it.
    from bench_report import KINDS

    if as_json or result["benchmark"] not in KINDS:
        print(json.dumps(result, allow_nan=False), flush=True)
        return
    from odc_mpi.observe.terminal import make_console
    from odc_mpi.report.page import terminal

    make_console().print(terminal(KINDS[result["benchmark"]](result)))


def make_progress_printer(rank: int) -> Callable[[str], None]:
    """Return a function that prints a line to standard error on rank 0, and does nothing on other ranks."""

    def print_line(line: str) -> None:
        if rank == 0:
            print("odc-mpi: measuring", line, file=sys.stderr, flush=True)

    return print_line


def parse_sizes(text: str, option: str = "--sizes") -> list[int]:
    """Parse a list of sizes such as ``64K,1M`` into bytes, and remove duplicates.

    Raises `UserError`, whose message names `option`, unless each size is a positive multiple of 4 bytes.
    """
    sizes = []
    for word in map(str.strip, text.split(",")):
        num_bytes = parse_size(word)
        if not num_bytes or num_bytes % 4:
            raise UserError(f"{option}: expected sizes such as 64K,1M,256M in multiples of 4 bytes, got {word!r}")
        sizes.append(num_bytes)
    return list(dict.fromkeys(sizes))

"""What all benchmarks share: interleaved rounds, medians, goals, and the words that a person sees."""

import json
import operator
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from time import perf_counter
from typing import Any, TypeVar

from odc_mpi.errors import UserError
from odc_mpi.formatting import parse_size
from odc_mpi.simulate.events import quartiles

T = TypeVar("T")

#: What is measured if nothing else is asked for.
DEFAULT_SIZES = "64K,256K,1M,4M,16M,64M,256M"


def interleaved(
    variants: Mapping[str, Callable[[], T]], repeats: int, on_call: Callable[[int, str], None] = lambda turn, name: None
) -> dict[str, list[T]]:
    """Call each variant in turn, round after round, so that a slow moment of the machine meets them all alike.

    A round begins with another one each time: what comes first may find a disk or a cache that the others do not.

    Args:
        variants: By name.
        repeats: Rounds.
        on_call: Called with the number of the round and the name before each call.

    Returns:
        The results of each variant, in order.
    """
    results: dict[str, list[T]] = {name: [] for name in variants}
    for turn in range(repeats):
        for name in rotate(list(variants), turn):
            on_call(turn, name)
            results[name].append(variants[name]())
    return results


def rotate(names: Sequence[str], turn: int) -> list[str]:
    """Return the names in their order, beginning with another one each turn, so that none always comes first."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def seconds(operations: Sequence[Callable[[], object]], times: int, finish: Callable[[], object]) -> float:
    """Call `times` operations in turn, then `finish` once. Local, if they are.

    Returns:
        Seconds of one operation, the mean.
    """
    row = list(islice(cycle(operations), times))
    start = perf_counter()
    for operation in row:
        operation()
    finish()
    return (perf_counter() - start) / times


def entries(
    times: Mapping[str, Sequence[float]], num_bytes: int, **references: Callable[[str], str | None]
) -> dict[str, dict[str, Any]]:
    """Return the entries of variants in the JSON object.

    Args:
        times: Seconds of an operation in each round, by variant.
        num_bytes: Of an operation.
        references: By the name of a figure: returns the variant that another one's speed is compared with.

    Returns:
        By variant `seconds` and `gb_per_s`, the quartiles over its rounds, and its speed as a multiple of each
        reference's, the median over rounds; None where that was not measured.
    """

    def multiple(name: str, other: str | None) -> float | None:
        return ratio(times[other], times[name]) if other and other in times else None

    return {
        name: {
            "seconds": quartiles(times_of_variant),
            "gb_per_s": quartiles([num_bytes / one / 1e9 for one in times_of_variant]),
            **{figure: multiple(name, reference(name)) for figure, reference in references.items()},
        }
        for name, times_of_variant in times.items()
    }


def ratio(reference: Sequence[float], times: Sequence[float]) -> float:
    """Return a speed as a multiple of a reference's: its time by the own one, the median over rounds of both."""
    return statistics.median(a / b for a, b in zip(reference, times, strict=False))


_BOUNDS = {">=": operator.ge, "<=": operator.le, "<": operator.lt}


@dataclass(frozen=True)
class Goal:
    """A bound on a figure of a benchmark.

    Attributes:
        name: In the JSON object.
        bound: ">=", "<=" or "<".
        expected: The figure is to be within this.
    """

    name: str
    bound: str
    expected: float

    def evaluate(self, figure: float, **of: Any) -> dict[str, Any]:
        """Return the entry of a figure among `goals` of the JSON object.

        Args:
            figure: As measured.
            of: Further keys: the size and the variant.
        """
        reached = _BOUNDS[self.bound](figure, self.expected)
        return {"goal": self.name, **of, "figure": figure, "expected": self.expected, "reached": reached}


def print_result(result: Mapping[str, Any], as_json: bool) -> None:
    """Print a benchmark's object, as one line of JSON or as tables for people. Local; for rank 0."""
    if as_json:
        print(json.dumps(result, allow_nan=False), flush=True)
        return
    # Not at the top: both take a while, and the process that starts the ranks shows nothing.
    from odc_mpi.observe.terminal import make_console
    from odc_mpi.report.bench_report import describe
    from odc_mpi.report.terminal import render

    make_console().print(render(describe(result)))


def make_progress_printer(rank: int) -> Callable[[str], None]:
    """Return a function that prints the next measurement on standard error, on rank 0 alone."""

    def print_line(line: str) -> None:
        if rank == 0:
            print("odc-mpi: measuring", line, file=sys.stderr, flush=True)

    return print_line


def parse_sizes(text: str, option: str = "--sizes") -> list[int]:
    """Read sizes such as `64K,1M,256M`, in bytes, of whole fp32 elements, each once.

    Raises:
        UserError: Something else was written.
    """
    sizes = []
    for word in map(str.strip, text.split(",")):
        num_bytes = parse_size(word)
        if not num_bytes or num_bytes % 4:
            raise UserError(f"{option}: expected sizes such as 64K,1M,256M in multiples of 4 bytes, got {word!r}")
        sizes.append(num_bytes)
    return list(dict.fromkeys(sizes))

"""What all benchmarks share: interleaved rounds, medians, goals, and the words that a person sees."""

import json
import operator
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from time import perf_counter
from typing import Any, TypeVar

from odc_mpi.errors import UserError
from odc_mpi.simulate.spread import Spread
from odc_mpi.wording import SUFFIXES

T = TypeVar("T")

#: What is measured if nothing else is asked for.
DEFAULT_SIZES = "64K,256K,1M,4M,16M,64M,256M"


def interleaved(variants: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Call each variant in turn, round after round, so that a slow moment of the machine meets them all alike. Local.

    A round begins with another one each time: what comes first may find a disk or a cache that the others do not.

    Returns:
        The results of each variant, in order.
    """
    results: dict[str, list[T]] = {name: [] for name in variants}
    for turn in range(repeats):
        for name in around(list(variants), turn):
            results[name].append(variants[name]())
    return results


def around(names: Sequence[str], turn: int) -> list[str]:
    """Return the names in their order, beginning with another one each turn, so that none always comes first. Local."""
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


def times_in(one_s: float, sample_s: float, most: int) -> int:
    """Return the number of operations of `one_s` seconds in a sample of `sample_s`, from 1 to `most`. Local."""
    return max(1, min(most, round(sample_s / max(one_s, sample_s / most))))


def sized_rounds(
    samples: Mapping[str, Callable[[int], float]],
    repeats: int,
    sample_s: float,
    most: int,
    agree: Callable[[dict[str, list[float]]], dict[str, list[float]]] = lambda times: times,
) -> dict[str, list[float]]:
    """Measure variants in rounds, each with as many operations in a row as take about `sample_s`. Local, if they are.

    Args:
        samples: By name: takes a number of operations, and returns the seconds of one.
        repeats: Rounds.
        sample_s: Seconds of a row.
        most: Operations of a row at most.
        agree: Makes the times the same on every rank.

    Returns:
        The seconds of an operation in each round.
    """
    # The first row touches memory for the first time: the second one tells how long the others should be.
    first = agree(interleaved({name: partial(sample, 1) for name, sample in samples.items()}, 2))
    rows = {name: partial(sample, times_in(first[name][-1], sample_s, most)) for name, sample in samples.items()}
    return agree(interleaved(rows, repeats))


def speeds(num_bytes: int, times: Sequence[float]) -> dict[str, Any]:
    """Return `seconds` and `gb_per_s` of a variant in the JSON object, as quartiles over its rounds. Local."""
    gb_per_s = [num_bytes / one / 1e9 for one in times]
    return {"seconds": asdict(Spread.of(times)), "gb_per_s": asdict(Spread.of(gb_per_s))}


def ratio(reference: Sequence[float], times: Sequence[float]) -> float:
    """Return a speed as a multiple of a reference's: the median over rounds of its time by the own time. Local."""
    return statistics.median(a / b for a, b in zip(reference, times, strict=True))


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

    def judge(self, figure: float, **of: Any) -> dict[str, Any]:
        """Return the entry of a figure among `goals` of the JSON object. Local.

        Args:
            figure: As measured.
            of: Further keys: the size and the variant.
        """
        reached = _BOUNDS[self.bound](figure, self.expected)
        return {"goal": self.name, **of, "figure": figure, "expected": self.expected, "reached": reached}


def show(result: Mapping[str, Any], as_json: bool) -> None:
    """Print a benchmark's object, as one line of JSON or as tables for people. Local; for rank 0."""
    if as_json:
        print(json.dumps(result, allow_nan=False), flush=True)
        return
    # Not at the top: both take a while, and the process that starts the ranks shows nothing.
    from odc_mpi.observe.terminal import make_console
    from odc_mpi.report.bench_report import describe
    from odc_mpi.report.terminal import rendered

    make_console().print(rendered(describe(result)))


def speaker(rank: int) -> Callable[[str], None]:
    """Return a function that prints the next measurement on standard error, on rank 0 alone. Local."""

    def say(line: str) -> None:
        if rank == 0:
            print("odc-mpi: measuring", line, file=sys.stderr, flush=True)

    return say


def parse_sizes(text: str, option: str = "--sizes") -> list[int]:
    """Read sizes such as `64K,1M,256M`, in bytes, of whole fp32 elements, each once. Local.

    Args:
        text: As written.
        option: Behind which, for the message.

    Raises:
        UserError: Something else was written.
    """
    return list(dict.fromkeys(_parse_size(word.strip(), option) for word in text.split(",")))


def _parse_size(word: str, option: str) -> int:
    scale = SUFFIXES.get(word[-1:].upper(), 1)
    digits = word if scale == 1 else word[:-1]
    num_bytes = int(digits) * scale if digits.isdecimal() and digits.isascii() and len(digits) < 20 else 0
    if num_bytes <= 0 or num_bytes % 4:
        raise UserError(f"{option}: expected sizes such as 64K,1M,256M in multiples of 4 bytes, got {word!r}")
    return num_bytes

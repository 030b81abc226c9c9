"""Times to trust on a machine with moods: interleaved rounds, medians, quartiles; and a word on what comes next."""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from time import perf_counter
from typing import Any, TypeVar

from odc_mpi.errors import UserError

T = TypeVar("T")

#: What is measured if nothing else is asked for.
DEFAULT_SIZES = "64K,256K,1M,4M,16M,64M,256M"

_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Spread:
    """A sample in three numbers.

    Attributes:
        low: The lower quartile.
        median: The middle.
        high: The upper quartile.
    """

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise at least one value. Local."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high)


def interleaved(variants: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Call each variant in turn, round after round, so that a slow moment of the machine meets them all alike. Local.

    A round begins with another one each time: what comes first may find a disk or a cache that the others do not.

    Returns:
        What they returned, in order.
    """
    results: dict[str, list[T]] = {name: [] for name in variants}
    for turn in range(repeats):
        for name in around(list(variants), turn):
            results[name].append(variants[name]())
    return results


def around(names: Sequence[str], turn: int) -> list[str]:
    """Return them in their order, beginning with another one each turn, so that none always comes first. Local."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def seconds(operations: Sequence[Callable[[], object]], times: int, finish: Callable[[], object]) -> float:
    """Call `times` operations in turn, then `finish` once. Local, if they are.

    Returns:
        All the seconds by `times`.
    """
    row = list(islice(cycle(operations), times))
    start = perf_counter()
    for operation in row:
        operation()
    finish()
    return (perf_counter() - start) / times


def each_for(budget_s: float, sample: Callable[[], T]) -> list[T]:
    """Take samples, at least one, until `budget_s` are over. Local, if they are.

    Returns:
        What each returned.
    """
    end = perf_counter() + budget_s
    samples = [sample()]
    while perf_counter() < end:
        samples.append(sample())
    return samples


def times_in(one_s: float, sample_s: float, most: int) -> int:
    """Return how many operations of `one_s` seconds make a sample of about `sample_s`, from 1 to `most`. Local."""
    return max(1, min(most, round(sample_s / max(one_s, sample_s / most))))


def ratio(reference: Sequence[float], times: Sequence[float]) -> float:
    """Return a speed as a multiple of a reference's: the median over rounds of its time by the own time. Local."""
    return statistics.median(a / b for a, b in zip(reference, times, strict=True))


def speaker(rank: int) -> Callable[[str], None]:
    """Return what tells a person, on rank 0 alone, what is measured next: on standard error. Local."""

    def say(line: str) -> None:
        if rank == 0:
            print("odc-mpi: measuring", line, file=sys.stderr, flush=True)

    return say


def told_ranks(result: Mapping[str, Any]) -> str:
    """Return on what a benchmark ran, by `library`, `ranks` and `nodes` of its object. Local."""
    ranks, nodes = result["ranks"], result["nodes"]
    return f"{result['library']}, {ranks} rank{'s'[: ranks != 1]} on {nodes} node{'s'[: nodes != 1]}"


def told_load(result: Mapping[str, Any]) -> str:
    """Return how busy the node was around a benchmark, by `load_average` of its object. Local."""
    return "load of the node: {:.1f} before, {:.1f} after".format(*result["load_average"])


def parse_sizes(text: str, option: str = "--sizes") -> list[int]:
    """Read sizes such as `64K,1M,256M`, in bytes, of whole fp32 elements, each once. Local.

    Args:
        text: As written.
        option: Behind which, for the message.

    Raises:
        UserError: Something else was written.
    """
    return list(dict.fromkeys(_parse_size(word.strip(), option) for word in text.split(",")))


def format_size(num_bytes: int) -> str:
    """Write a size the way it is read. Local."""
    for suffix, scale in reversed(_SUFFIXES.items()):
        if num_bytes % scale == 0:
            return f"{num_bytes // scale}{suffix}"
    return str(num_bytes)


def _parse_size(word: str, option: str) -> int:
    scale = _SUFFIXES.get(word[-1:].upper(), 1)
    digits = word if scale == 1 else word[:-1]
    num_bytes = int(digits) * scale if digits.isdecimal() and digits.isascii() and len(digits) < 20 else 0
    if num_bytes <= 0 or num_bytes % 4:
        raise UserError(f"{option}: expected sizes such as 64K,1M,256M in multiples of 4 bytes, got {word!r}")
    return num_bytes

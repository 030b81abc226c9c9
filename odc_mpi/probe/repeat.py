"""Work done over and over for a while: to measure it, or to keep a core busy. Pure."""

from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")


def repeat_for(budget_s: float, sample: Callable[[], T], max_repeats: int | None = None) -> list[T]:
    """Take samples, at least one, until `budget_s` are over. Local, if they are.

    Args:
        budget_s: The time in seconds.
        sample: Takes one.
        max_repeats: Their greatest number; by default any.

    Returns:
        Their results.
    """
    end = perf_counter() + budget_s
    samples = [sample()]
    while perf_counter() < end and len(samples) != max_repeats:
        samples.append(sample())
    return samples


def timed(function: Callable[[], object]) -> float:
    """Return the seconds that a function takes. Local, if it is."""
    began = perf_counter()
    function()
    return perf_counter() - began

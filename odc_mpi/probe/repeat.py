"""Repetition of a function for a given time, to measure it or to keep a core busy."""

from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")


def repeat_for(budget_s: float, sample: Callable[[], T], max_repeats: int | None = None) -> list[T]:
    """Call `sample` for `budget_s` seconds, at least once and at most `max_repeats` times; return the results."""
    end = perf_counter() + budget_s
    samples = [sample()]
    while perf_counter() < end and len(samples) != max_repeats:
        samples.append(sample())
    return samples


def timed(function: Callable[[], object]) -> float:
    """Call a function and return its duration in seconds."""
    began = perf_counter()
    function()
    return perf_counter() - began

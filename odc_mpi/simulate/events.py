"""Time at which ranks end a minibatch, for each way of synchronizing. Knows durations only, no plans.

    collective         all ranks synchronize at every unit of every microbatch
    static             windows: each rank runs its own microbatches
    context_parallel   windows: the ranks of a split sequence wait for keys, values and gradients in each unit
    dynamic            windows: an idle rank claims the next microbatch

All ranks synchronize at the end of a minibatch, so the slowest rank determines its time. All times are in seconds.
"""

import heapq
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest

#: Forward's fraction of the time of a unit. The backward needs twice as long (Kaplan et al. 2020, arXiv 2001.08361).
FORWARD = 1 / 3

#: Beginnings and ends of intervals, in order.
Intervals = list[tuple[float, float]]


@dataclass(frozen=True)
class SimulatedTiming:
    """Simulated minibatch: the end of the slowest rank, and for each rank its microbatches without dummies."""

    end_s: float
    timeline: list[Intervals]


def simulate_collective(durations: Sequence[Sequence[float]], dummy_s: Sequence[float]) -> SimulatedTiming:
    """Simulate ranks that synchronize in each microbatch.

    They synchronize at every unit. A unit is the same fraction of a microbatch on all ranks, so the slowest rank of a
    microbatch is the slowest at each of its units: synchronizing once per microbatch takes the same time.

    Args:
        durations: Duration of each microbatch of each rank; 0 for an empty one.
        dummy_s: Duration of a dummy microbatch on each rank, which runs instead of an empty one.
    """
    timeline: list[Intervals] = [[] for _ in durations]
    end = 0.0
    for durations_of_turn in zip_longest(*durations, fillvalue=0.0):
        for seconds, busy in zip(durations_of_turn, timeline, strict=True):
            if seconds:
                busy.append((end, end + seconds))
        end += max(seconds or empty for seconds, empty in zip(durations_of_turn, dummy_s, strict=True))
    return SimulatedTiming(end, timeline)


def simulate_static(durations: Sequence[Sequence[float]]) -> SimulatedTiming:
    """Simulate ranks that run their own microbatches and skip empty ones; `durations` as in `simulate_collective`."""
    ends = [[0.0, *accumulate(durations_of_rank)] for durations_of_rank in durations]
    timeline = [[(began, ended) for began, ended in pairwise(ends_of_rank) if ended > began] for ends_of_rank in ends]
    return SimulatedTiming(max((ends_of_rank[-1] for ends_of_rank in ends), default=0.0), timeline)


def simulate_context_parallel(began: Sequence[float], seconds: Sequence[float], units: int) -> list[Intervals]:
    """Simulate the chunks of one sequence, first to last, each on its own rank.

    In the forward of a unit, a chunk publishes its keys and values at the beginning, and waits for those of all earlier
    chunks. In the backward, units in reverse order, it leaves a unit when all later chunks have added to its gradients.

    Args:
        began: Time at which the rank of each chunk begins with it.
        seconds: Duration of each chunk without waiting.
        units: Number of units of the model, which have equal durations.

    Returns:
        For each chunk one interval per unit of the forward, then of the backward.
    """
    at = list(began)
    timeline: list[Intervals] = [[] for _ in at]

    def compute(fraction: float) -> list[float]:
        ends = [start + fraction * chunk_s / units for start, chunk_s in zip(at, seconds, strict=True)]
        for intervals, start, end in zip(timeline, at, ends, strict=True):
            intervals.append((start, end))
        return ends

    for _ in range(units):
        at = list(accumulate(at, max))
        at = compute(FORWARD)
    for _ in range(units):
        at = list(accumulate(reversed(compute(1 - FORWARD)), max))[::-1]
    return timeline


def simulate_dynamic(
    ready: Sequence[float], available_at: Sequence[float], duration: Callable[[int, int], float], ticket_s: float = 0.0
) -> SimulatedTiming:
    """Simulate ranks that claim microbatches, in order, when they are idle. Of two idle ranks, the lower one is first.

    Args:
        ready: Earliest time at which each microbatch can run.
        available_at: Time at which each rank begins to claim.
        duration: Function that returns the duration of a microbatch, called with rank and index.
        ticket_s: Time to claim a ticket. A rank claims one more than it has microbatches, to learn that none is left.
    """
    free = [(at, rank) for rank, at in enumerate(available_at)]
    heapq.heapify(free)
    timeline: list[Intervals] = [[] for _ in available_at]
    for microbatch, ready_s in enumerate(ready):
        at, rank = free[0]
        began = max(at + ticket_s, ready_s)
        ended = began + duration(rank, microbatch)
        timeline[rank].append((began, ended))
        heapq.heapreplace(free, (ended, rank))
    return SimulatedTiming(max(at for at, _ in free) + ticket_s, timeline)


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the quartiles as `low`, `median` and `high`."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * [*values]
    return {"low": low, "median": median, "high": high}


def merge_intervals(intervals: Iterable[tuple[float, float]], gap_s: float) -> Intervals:
    """Merge intervals, given in order, whose gaps are shorter than `gap_s`."""
    merged: Intervals = []
    for began, ended in intervals:
        if merged and began - merged[-1][1] < gap_s:
            merged[-1] = merged[-1][0], max(merged[-1][1], ended)
        else:
            merged.append((began, ended))
    return merged

"""Simulation of the times at which ranks finish a minibatch, for each kind of synchronization.

All ranks synchronize at the end of a minibatch, so the slowest rank determines its duration. All times are in seconds.
"""

import heapq
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest

#: Fraction of a unit's time that its forward pass takes. The backward pass takes twice as long as the forward pass
#: (Kaplan et al. 2020, arXiv 2001.08361).
FORWARD = 1 / 3

#: Intervals as pairs of start and end times in seconds, in ascending order.
Intervals = list[tuple[float, float]]


@dataclass(frozen=True)
class SimulatedTiming:
    """Time in seconds when the slowest rank finishes, and each rank's busy intervals, excluding dummy microbatches."""

    end_s: float
    timeline: list[Intervals]


def simulate_collective(durations: Sequence[Sequence[float]], dummy_s: Sequence[float]) -> SimulatedTiming:
    """Simulate ranks that synchronize at every unit of every microbatch.

    The same rank is the slowest at all units of a microbatch, so it suffices to synchronize once per microbatch.
    `durations[rank]` contains the durations of the rank's microbatches. Where a duration is 0 or missing, the rank runs
    a dummy microbatch, which takes `dummy_s[rank]`.
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
    """Simulate ranks that do not wait for each other. `durations[rank]` lists its microbatches' durations."""
    ends = [[0.0, *accumulate(durations_of_rank)] for durations_of_rank in durations]
    timeline = [[(began, ended) for began, ended in pairwise(ends_of_rank) if ended > began] for ends_of_rank in ends]
    return SimulatedTiming(max((ends_of_rank[-1] for ends_of_rank in ends), default=0.0), timeline)


def simulate_context_parallel(began: Sequence[float], seconds: Sequence[float], units: int) -> list[Intervals]:
    """Simulate the chunks of one sequence, in the order of their tokens, each on a different rank.

    In the forward pass of a unit, a chunk publishes its keys and values, then waits for those of all earlier chunks. In
    the backward pass, a unit ends when all later chunks have added to the gradients of these keys and values.

    Chunk `i` begins at `began[i]` and takes `seconds[i]`, excluding waits. All units take the same time. For each
    chunk, the result contains one interval per unit for the forward pass, then one per unit for the backward pass.
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
    num_microbatches: int, available_at: Sequence[float], duration: Callable[[int, int], float]
) -> SimulatedTiming:
    """Simulate ranks that claim the next microbatch when they become idle.

    Rank `r` can claim microbatches from time `available_at[r]` on. Microbatch `k` takes `duration(r, k)` on rank
    `r`. The rank that became idle first claims first; ties go to the lowest rank.
    """
    free = [(at, rank) for rank, at in enumerate(available_at)]
    heapq.heapify(free)
    timeline: list[Intervals] = [[] for _ in available_at]
    for microbatch in range(num_microbatches):
        began, rank = free[0]
        ended = began + duration(rank, microbatch)
        timeline[rank].append((began, ended))
        heapq.heapreplace(free, (ended, rank))
    return SimulatedTiming(max(at for at, _ in free), timeline)


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the quartiles of one or more values as a dictionary with the keys `low`, `median` and `high`."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * [*values]
    return {"low": low, "median": median, "high": high}


def merge_intervals(intervals: Iterable[tuple[float, float]], gap_s: float) -> Intervals:
    """Merge successive intervals if the gap between them is shorter than `gap_s` seconds. The input must be sorted."""
    merged: Intervals = []
    for began, ended in intervals:
        if merged and began - merged[-1][1] < gap_s:
            merged[-1] = merged[-1][0], max(merged[-1][1], ended)
        else:
            merged.append((began, ended))
    return merged

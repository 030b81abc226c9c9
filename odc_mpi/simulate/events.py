"""When ranks end a minibatch, by what they wait for. Arithmetic with seconds; nothing here knows plans.

    lockstep   collectives: all ranks synchronize at every unit of every microbatch
    apart      windows: each rank works through its own microbatches
    layered    windows: ranks that share a sequence wait for each other's keys, values and gradients in each unit
    drawn      windows: whoever is free draws the next microbatch

All synchronize at the minibatch boundary, so the last rank's end counts.
"""

import heapq
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

#: Forward's part of a unit's time; backward takes twice as long (Kaplan et al. 2020, arXiv 2001.08361).
FORWARD = 1 / 3

#: When a rank computes: beginning and end in seconds, in order.
Intervals = list[tuple[float, float]]


@dataclass(frozen=True)
class SimulatedTiming:
    """What a minibatch took.

    Attributes:
        end_s: When the last rank ends, in seconds.
        timeline: For each rank, when it works on a microbatch, padding left out.
    """

    end_s: float
    timeline: list[Intervals]


def simulate_collective(durations: Sequence[Sequence[float]], dummy_s: Sequence[float]) -> SimulatedTiming:
    """Time ranks that synchronize in each microbatch.

    They do so at every unit, and a unit's part of a microbatch is the same on each rank, so the slowest rank of a
    microbatch is the slowest at each of its units: synchronizing once per microbatch takes the same time.

    Args:
        durations: For each rank, seconds of each of its microbatches; 0 for one that is empty.
        dummy_s: For each rank, seconds of a microbatch that it runs empty, so that the others need not hang.
    """
    turns = max(map(len, durations), default=0)
    timeline: list[Intervals] = [[] for _ in durations]
    end = 0.0
    for turn in range(turns):
        slowest = 0.0
        for durations_of_rank, empty, busy in zip(durations, dummy_s, timeline, strict=True):
            seconds = durations_of_rank[turn] if turn < len(durations_of_rank) else 0.0
            slowest = max(slowest, seconds or empty)
            if seconds:
                busy.append((end, end + seconds))
        end += slowest
    return SimulatedTiming(end, timeline)


def simulate_static(durations: Sequence[Sequence[float]]) -> SimulatedTiming:
    """Time ranks that have their own microbatches and skip empty ones.

    Args:
        durations: For each rank, seconds of each of its microbatches; 0 for one that is empty.
    """
    ends = [[0.0, *accumulate(ends_of_rank)] for ends_of_rank in durations]
    timeline = [[(began, ended) for began, ended in pairwise(ends_of_rank) if ended > began] for ends_of_rank in ends]
    return SimulatedTiming(max((ends_of_rank[-1] for ends_of_rank in ends), default=0.0), timeline)


def simulate_context_parallel(began: Sequence[float], seconds: Sequence[float], units: int) -> list[Intervals]:
    """Time the pieces of one sequence, first to last, each on another rank.

    In forward a piece shows its keys and values when it comes to a unit, and waits for those of all pieces before it.
    In backward, units the other way round, it leaves a unit when all pieces after it have added to its gradients there.

    Args:
        began: When each piece's rank comes to it, in seconds.
        seconds: What each piece takes without waiting.
        units: Into how many units of equal time the model is cut.

    Returns:
        For each piece when it computes, a span for each unit, forward and backward.
    """
    at = list(began)
    timeline: list[Intervals] = [[] for _ in at]

    def compute(part: float) -> list[float]:
        ends = [start + part * chunk_s / units for start, chunk_s in zip(at, seconds, strict=True)]
        for chunk_s, start, end in zip(timeline, at, ends, strict=True):
            chunk_s.append((start, end))
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
    """Time ranks that draw microbatches, in order, whenever they are free; of two free at once, the lower rank first.

    Args:
        ready: When each microbatch can be run at the earliest, in seconds.
        available_at: When each rank begins to draw, in seconds.
        duration: Seconds of microbatch k on rank r, as (r, k).
        ticket_s: Seconds to draw a ticket. A rank draws one more than it gets microbatches: that there are none left is
            what the last one says.
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
    """Return the lower quartile, the median and the upper quartile, `low`, `median` and `high`."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * [*values]
    return {"low": low, "median": median, "high": high}


def merge_intervals(intervals: Iterable[tuple[float, float]], gap_s: float) -> Intervals:
    """Join neighbours that are closer than `gap_s`; they come in order."""
    joined: Intervals = []
    for began, ended in intervals:
        if joined and began - joined[-1][1] < gap_s:
            joined[-1] = joined[-1][0], max(joined[-1][1], ended)
        else:
            joined.append((began, ended))
    return joined

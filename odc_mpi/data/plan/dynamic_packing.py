"""Packing a minibatch into microbatches that idle ranks claim, costliest first.

The end times of ranks differ by up to one microbatch, so the last microbatches must be small. However, each microbatch
has a constant cost, so there should be few microbatches. Therefore, most packings consist of a few large microbatches
per rank and a tail of small microbatches with the shortest sequences, as in factoring (Hummel, Schonberg and Flynn,
"Factoring: a method for scheduling parallel loops", 1992). Several packings are compared, and the one with the earliest
end, averaged over equal and different rank speeds (`SPREADS`), is used. Decisions depend only on comparisons, sums in a
fixed order and `math.fsum`, so every process computes the same packing.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from odc_mpi.data.plan.partition import argsort_descending, even_fit, partition

SequenceIndices = tuple[int, ...]

PER_RANK = (1, 2, 3, 4, 8)  # large microbatches, unless max_tokens requires more
TAIL_SHARES = (0.0, 0.1, 0.2, 0.3)  # of the minibatch's cost
TAIL_RATIOS = (2, 4)  # of the cost of a large microbatch to that of a microbatch in the tail
SPREADS = (0.0, 0.1)  # values of `spread` in `makespan` for which packings are evaluated
#: Limits for the differencing method. With `MANY_PER_MICROBATCH` or more sequences per microbatch, costs are
#: already even without it. With `MANY` or more sequences in total, it takes too long.
MANY_PER_MICROBATCH, MANY = 16, 2048


def pack_pool(
    lengths: npt.NDArray[np.int64],
    costs: npt.NDArray[np.float64],
    max_tokens: int,
    constant: float,
    size: int,
    available_at: Sequence[npt.NDArray[np.float64]] | None = None,
) -> tuple[SequenceIndices, ...]:
    """Pack a minibatch for `size` ranks. Returns microbatches, costliest first, as positions in `lengths`.

    `lengths`, int64 [n], contains the length of each sequence in tokens, and `costs`, float64 [n], contains its cost.
    No sequence may be longer than `max_tokens`. A microbatch costs `constant` more than its sequences. `available_at`
    contains, for each value in `SPREADS`, the time at which each rank starts to claim microbatches, in units of cost,
    float64 [size]; None if all ranks start at 0.
    """
    if not len(lengths):
        return ()
    starts = [np.zeros(size)] * len(SPREADS) if available_at is None else available_at
    best: list[SequenceIndices] = []
    earliest = math.inf
    each = costs.tolist()
    for bins in _candidates(lengths, costs, max_tokens, size):
        totals = _sums(each, bins)
        order = sorted(range(len(bins)), key=lambda i: (-totals[i], min(bins[i])))
        work = [constant + totals[i] for i in order]
        end = 0.0
        for spread, free in zip(SPREADS, starts, strict=True):
            if end < earliest:  # else this packing is already worse
                end += makespan(work, size, spread, free)
        if end < earliest:
            best, earliest = [tuple(bins[i]) for i in order], end
    return tuple(best)


def makespan(
    work: npt.ArrayLike, size: int, spread: float = 0.0, available_at: npt.NDArray[np.float64] | None = None
) -> float:
    """Return the time, in units of cost, at which the last rank ends if idle ranks claim items in the given order.

    `work` contains the cost of each item, float64 [n]. Costs are multiplied by factors from `1 - spread` on the first
    of `size` ranks to `1 + spread` on the last. `available_at` contains the time at which each rank starts to claim
    items, float64 [size]; None if all ranks start at 0.
    """
    costs = np.asarray(work, dtype=np.float64)
    ranks = np.arange(size)
    slowness = 1 + spread * (2 * ranks / (size - 1) - 1 if size > 1 else 0 * ranks)
    free = np.zeros(size) if available_at is None else available_at.copy()
    while len(costs):
        # `count` ranks claim one item each before one of them is idle again.
        claiming = np.argsort(free, kind="stable")[: len(costs)]
        began = free[claiming]
        ended = began + costs[: len(claiming)] * slowness[claiming]
        waits = began[1:] >= np.minimum.accumulate(ended)[:-1]
        count = int(waits.argmax()) + 1 if waits.any() else len(claiming)
        free[claiming[:count]] = ended[:count]
        costs = costs[count:]
    return float(free.max())


def _sums(values: Sequence[float], bins: Sequence[Sequence[int]]) -> list[float]:
    return [math.fsum([values[i] for i in indices]) for indices in bins]


def _candidates(
    lengths: npt.NDArray[np.int64], costs: npt.NDArray[np.float64], max_tokens: int, size: int
) -> Iterator[list[list[int]]]:
    """Yield different packings for `size` ranks, as the positions of the sequences in each bin."""

    def pack(part: list[int], max_cost: float) -> list[list[int]]:
        return [[part[i] for i in indices] for indices in even_fit(lengths[part], costs[part], max_tokens, max_cost)]

    def pack_evenly(part: list[int], count: int) -> list[list[int]]:
        """Pack some sequences into about `count` bins of about equal cost, or into more if `max_tokens` requires it."""
        part_costs = costs[part].tolist()
        if len(part) < min(MANY_PER_MICROBATCH * count, MANY):
            bins = [[part[i] for i in indices] for indices in partition(part_costs, count) if indices]
            if max(_sums(lengths.tolist(), bins)) <= max_tokens:
                return bins
        return pack(part, math.fsum(part_costs) / count)

    rising = argsort_descending(costs)[::-1]
    up_to = np.cumsum(costs[rising])
    minimum = -(-int(lengths.sum()) // (size * max_tokens))
    for tail in TAIL_SHARES:
        num_small = int(np.searchsorted(up_to, tail * up_to[-1], side="right")) if tail else 0
        small, large = rising[:num_small][::-1], rising[num_small:][::-1]
        if not large:
            continue
        for per_rank in sorted({max(minimum, target) for target in PER_RANK}):
            heads = pack_evenly(large, size * per_rank)
            if not num_small:
                yield heads
                continue
            max_cost = max(_sums(costs.tolist(), heads))
            for fraction in TAIL_RATIOS:
                yield heads + pack(small, max_cost / fraction)

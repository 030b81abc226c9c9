"""Cuts a minibatch into the microbatches that ranks draw, costliest first. Pure.

Ranks end up to one microbatch apart, so the last ones have to be small; each microbatch costs a constant besides its
sequences, so there should be few. Hence large ones first, about as many for each rank, and a tail of small ones made
from the shortest sequences, as in factoring (Hummel, Schonberg and Flynn, "Factoring: a method for scheduling parallel
loops", 1992). Several numbers for each rank and sizes of the tail are tried: the best cut ends earliest on equal ranks
and on ranks whose speeds differ, since costs are estimates.

Only comparisons, plain sums in a fixed order and `math.fsum` decide: every process gets the same cut.
"""

import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from odc_mpi.data.plan.partition import by_falling, even_fit, partition

Microbatch = tuple[int, ...]

#: Large microbatches for each rank, or as many as tokens ask for.
PER_RANK = (1, 2, 3, 4, 8)
#: Part of the cost that is left for the tail.
TAILS = (0.0, 0.1, 0.2, 0.3)
#: The cost of a large microbatch to one of the tail.
FRACTIONS = (2, 4)
#: Relative differences of the slowest and the fastest rank from the mean, for which a cut is tried.
SPREADS = (0.0, 0.1)
#: With so many sequences for each microbatch, costs come out even without the differencing method; with so many in all,
#: it takes too long.
MANY_EACH, MANY = 16, 2048


def cut(
    lengths: npt.NDArray[np.int64], costs: npt.NDArray[np.float64], max_tokens: int, constant: float, size: int
) -> tuple[Microbatch, ...]:
    """Cut a minibatch. Local.

    Args:
        lengths: Tokens of each sequence, int64 [n], each at most `max_tokens`, at least one.
        costs: Cost of each sequence, float64 [n].
        max_tokens: The most tokens in a microbatch.
        constant: Constant cost of a microbatch.
        size: Number of ranks.

    Returns:
        Microbatches of positions in `lengths`, costliest first; a position is in exactly one.
    """
    best: Sequence[tuple[float, int, Sequence[int]]] = ()
    earliest = math.inf
    each = costs.tolist()  # plain numbers are summed several times faster
    for bins in _candidates(lengths, costs, max_tokens, size):
        # As `ordered` has it; no two bins have the same first position.
        found = sorted((-math.fsum([each[i] for i in own]), min(own), own) for own in bins)
        work = [constant - minus for minus, _, _ in found]
        end = 0.0
        for spread in SPREADS:
            if end < earliest:  # else it can only come later still
                end += makespan(work, size, spread)
        if end < earliest:
            best, earliest = found, end
    return tuple(tuple(own) for _, _, own in best)


def makespan(work: Sequence[float], size: int, spread: float = 0.0) -> float:
    """Return the time at which the last rank ends, if ranks draw pieces of work in this order. Local.

    Args:
        work: Cost of each piece.
        size: Number of ranks.
        spread: Ranks take from 1 - spread to 1 + spread times the cost, evenly spaced.
    """
    slowness = [1 + spread * (2 * rank / (size - 1) - 1 if size > 1 else 0) for rank in range(size)]
    free = [(0.0, rank) for rank in range(size)]
    for cost in work:
        began, rank = free[0]
        heapq.heapreplace(free, (began + cost * slowness[rank], rank))
    return max(free)[0]


def ordered(bins: Sequence[Sequence[int]], costs: npt.NDArray[np.float64]) -> tuple[Microbatch, ...]:
    """Sort bins of positions by falling cost, equal ones by position. Local."""
    return tuple(map(tuple, sorted(bins, key=lambda own: (-math.fsum(costs[list(own)].tolist()), min(own)))))


def _candidates(
    lengths: npt.NDArray[np.int64], costs: npt.NDArray[np.float64], max_tokens: int, size: int
) -> Iterator[list[list[int]]]:
    rising = np.array(by_falling(costs))[::-1]
    up_to = np.cumsum(costs[rising])
    least = -(-int(lengths.sum()) // (size * max_tokens))
    for tail in TAILS:
        num_small = int(np.searchsorted(up_to, tail * up_to[-1], side="right")) if tail else 0
        small, large = rising[:num_small][::-1], rising[num_small:][::-1]
        if not len(large):
            continue
        for per_rank in sorted({max(least, wish) for wish in PER_RANK}):
            heads = _evenly(large, lengths, costs, max_tokens, size * per_rank)
            most = max(math.fsum(costs[own]) for own in heads)
            for fraction in FRACTIONS if num_small else (1,):
                yield heads + _packed(small, lengths, costs, max_tokens, most / fraction)


def _evenly(
    part: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    costs: npt.NDArray[np.float64],
    max_tokens: int,
    count: int,
) -> list[list[int]]:
    """Split a part of the minibatch into about so many bins of about equal cost, more where tokens ask for it."""
    if len(part) < min(MANY_EACH * count, MANY):
        bins = [part[own].tolist() for own in partition(costs[part].tolist(), count) if own]
        if all(int(lengths[own].sum()) <= max_tokens for own in bins):
            return bins
    return _packed(part, lengths, costs, max_tokens, math.fsum(costs[part]) / count)


def _packed(
    part: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    costs: npt.NDArray[np.float64],
    max_tokens: int,
    most: float,
) -> list[list[int]]:
    return [part[own].tolist() for own in even_fit(lengths[part], costs[part], max_tokens, most)]

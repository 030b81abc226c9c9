"""Context parallelism on demand, which splits the longest sequences of a minibatch across ranks.

A minibatch takes at least as long as its longest sequence. Therefore, sequences above a cost threshold are split into
chunks of about equal cost (`even_bounds`), each on a different rank. Only ranks that share a sequence wait for each
other.

    1. chunks    Each rank runs its chunks in the order of `Plan.splits`, which is the same on all ranks.
    2. tickets   Ranks that have run their chunks claim microbatches of unsplit sequences from `Plan.pool`.

Deadlocks cannot occur: a chunk waits only for other chunks of its sequence, and the ranks of the first unfinished
sequence have no earlier chunk left to run.

Several cost thresholds are tried. Each sequence above the threshold is split into the fewest chunks that are below it.
The best plan is the one with the earliest estimated end, averaged over equal and different rank speeds (`SPREADS`).
Every rank computes the same plan, because decisions depend only on arithmetic in a fixed order.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from odc_mpi.data.plan.balance import Costs, Lengths, Plan, SequenceSplit, dynamic
from odc_mpi.data.plan.cost import CostModel
from odc_mpi.data.plan.dynamic_packing import SPREADS, makespan, pack_pool
from odc_mpi.data.plan.partition import argsort_descending

ChunkCounts = npt.NDArray[np.int64]

#: Lowest cost threshold, relative to an even share of the minibatch's cost, and ratio of successive thresholds.
MIN_THRESHOLD, THRESHOLD_RATIO = 0.4, 1.06
#: Maximum number of chunks: `MAX_CHUNKS`, or `MAX_CHUNKS_PER_RANK` times the number of ranks if this is larger. There
#: is no maximum if max_tokens requires splits. Planning with thousands of chunks takes a long time and gains nothing.
MAX_CHUNKS, MAX_CHUNKS_PER_RANK = 64, 2
NUM_FINALISTS = 3  # most promising plans, which are computed completely
#: Maximum time of a plan with splits, relative to one without splits. Costs are too inexact for smaller gains.
MAX_RELATIVE_TIME = 0.98
NUM_BISECTIONS = 20  # in the search for the cost of the costliest chunk


def split_longest(lengths: Lengths, size: int, max_tokens: int, cost: CostModel, unsplit: Plan | None = None) -> Plan:
    """Plan a minibatch: split the costliest sequences across several ranks, and put all others in `Plan.pool`.

    This is a `BalanceStrategy`. If splitting saves less than 2% of the estimated time, and `max_tokens` does not
    require it, the plan is that of `balance.dynamic`, which a caller that has it can pass as `unsplit`. A sequence may
    have at most `size * max_tokens` tokens.
    """
    planner = _Planner(lengths, size, max_tokens, cost)
    best: Plan | None = None
    earliest = math.inf
    if not len(lengths) or int(lengths.max()) <= max_tokens:
        best = unsplit or dynamic(lengths, size, max_tokens, cost)
        earliest = MAX_RELATIVE_TIME * planner.estimate_end(best)
    if best and (size == 1 or earliest <= planner.even_end()):
        return best
    for estimate, counts in planner.promising():
        if estimate >= earliest:  # planning is slow, so skip plans that are worse even by estimate
            break
        plan = planner.plan(counts)
        end = planner.estimate_end(plan)
        if end < earliest:
            best, earliest = plan, end
    assert best is not None
    return best


class _Planner:
    """Planner for one minibatch. In its methods, `counts` contains the number of chunks of each sequence, int64 [n]."""

    def __init__(self, lengths: Lengths, size: int, max_tokens: int, cost: CostModel) -> None:
        self._lengths, self._size, self._max_tokens, self._cost = lengths, size, max_tokens, cost
        self._costs = cost.sequence(lengths)
        self._fewest = -(-lengths // max_tokens)

    def even_end(self) -> float:
        """Return the time at which all ranks would end if the work were distributed evenly, summed over `SPREADS`."""
        fewest = -(-int(self._lengths.sum()) // self._max_tokens)
        return len(SPREADS) * (math.fsum(self._costs.tolist()) + fewest * self._cost.constant) / self._size

    def promising(self) -> list[tuple[float, ChunkCounts]]:
        """Return the estimated ends and the chunk counts of the `NUM_FINALISTS` best plans, best first."""
        candidates = list({counts.tobytes(): counts for counts in self._candidates()}.values())
        ends = [self._estimate(counts) for counts in candidates]
        return [(ends[i], candidates[i]) for i in argsort_descending(-np.array(ends))[:NUM_FINALISTS]]

    def plan(self, counts: ChunkCounts) -> Plan:
        """Split sequences into chunks, assign the chunks to ranks, and put the other sequences in the pool."""
        split_sequences = [
            (i, even_bounds(int(self._lengths[i]), int(counts[i]), self._max_tokens, self._cost))
            for i in np.flatnonzero(counts > 1).tolist()
        ]
        split_sequences.sort(key=lambda split: -self._costliest(split[1]))  # ties are broken by position
        chunks = [(len(bounds) - 1, self._costliest(bounds)) for _, bounds in split_sequences]
        gangs, _ = self._assign_ranks(chunks, 0.0)
        splits = tuple(
            SequenceSplit(i, bounds, ranks) for (i, bounds), ranks in zip(split_sequences, gangs, strict=True)
        )
        rest = np.flatnonzero(counts == 1).tolist()
        remaining = self._lengths[rest], self._costs[rest]
        available_at = [self._assign_ranks(chunks, spread)[1] for spread in SPREADS]
        pool = pack_pool(*remaining, self._max_tokens, self._cost.constant, self._size, available_at)
        return Plan(((),) * self._size, tuple(tuple(rest[k] for k in microbatch) for microbatch in pool), splits)

    def estimate_end(self, plan: Plan) -> float:
        """Return the estimated time at which the last rank ends, summed over `SPREADS`."""
        work = [self._cost.constant + math.fsum(self._costs[list(indices)].tolist()) for indices in plan.pool]
        chunks = [(len(split.ranks), self._costliest(split.bounds)) for split in plan.splits]
        return self._sum_of_ends(work, chunks)

    def _candidates(self) -> Iterator[ChunkCounts]:
        constant, factor = self._cost.constant, self._cost.chunk_factor
        chunk_costs = factor * self._costs
        max_cost = self.even_end() / len(SPREADS) * MIN_THRESHOLD
        while True:
            requested = np.ceil(chunk_costs / max(max_cost - constant, 1e-3 * max_cost)).astype(np.int64)
            counts = np.where(self._costs + constant > max_cost, np.maximum(requested, 2), 1)
            counts = np.clip(counts, self._fewest, np.minimum(self._size, self._lengths))
            is_required = (self._fewest > 1).any()
            if is_required or counts[counts > 1].sum() <= max(MAX_CHUNKS, MAX_CHUNKS_PER_RANK * self._size):
                yield counts
            if (counts == self._fewest).all():
                break
            max_cost *= THRESHOLD_RATIO

    def _estimate(self, counts: ChunkCounts) -> float:
        """Estimate the end of the last rank, summed over `SPREADS`, assuming one unsplit sequence per microbatch."""
        is_split = counts > 1
        chunk_costs = self._cost.chunk_factor * self._costs / counts + self._cost.constant
        order = [i for i in argsort_descending(chunk_costs) if is_split[i]]
        each = list(zip(counts[order].tolist(), chunk_costs[order].tolist(), strict=True))
        return self._sum_of_ends(-np.sort(-self._costs[~is_split]), each)

    def _sum_of_ends(self, work: npt.ArrayLike, chunks: list[tuple[int, float]]) -> float:
        ends = (makespan(work, self._size, spread, self._assign_ranks(chunks, spread)[1]) for spread in SPREADS)
        return math.fsum(ends)

    def _assign_ranks(self, chunks: list[tuple[int, float]], spread: float) -> tuple[list[tuple[int, ...]], Costs]:
        """Assign the chunks of each sequence, given as their number and cost, to the ranks that become idle first.

        The chunks of a sequence begin together and end with the slowest. Returns the ranks of each sequence, and the
        time at which each rank becomes idle, float64 [size].
        """
        free, ranks, used = np.zeros(self._size), [], 0
        for count, each in chunks:
            # While there are enough unused ranks, use adjacent ones, which are mostly on one node.
            fresh = used + count <= self._size
            chosen = np.arange(used, used + count) if fresh else np.argsort(free, kind="stable")[:count]
            used += count
            # Expected slowness of the slowest of `count` ranks: the mean of the maximum of uniform numbers.
            slowness = 1 + spread * (count - 1) / (count + 1)
            free[chosen] = free[chosen].max() + each * slowness
            ranks.append(tuple(chosen.tolist()))
        return ranks, free

    def _costliest(self, bounds: tuple[int, ...]) -> float:
        return self._cost.constant + max(self._cost.chunk(begin, end) for begin, end in pairwise(bounds))


def even_bounds(length: int, count: int, max_tokens: int, cost: CostModel) -> tuple[int, ...]:
    """Split a sequence into at most `count` chunks so that the costliest chunk is as cheap as possible.

    Under causal attention, later tokens cost more, so the first chunk is the longest. Striped Attention (arXiv
    2311.09431) and Llama 3 (arXiv 2407.21783, section 3.3.2) balance the cost by giving each rank tokens from several
    parts of the sequence. Here, each chunk is one contiguous range of tokens. `length` is the number of tokens in the
    sequence, which must not exceed `count * max_tokens`. Each chunk has at most `max_tokens` tokens. Returns the bounds
    of the chunks, as in `SequenceSplit.bounds`.
    """
    assert count * max_tokens >= length, f"{count} chunks of {max_tokens} tokens for {length}"
    # The costliest chunk costs at least an equal share.
    low = cost.chunk(0, length) / count
    margin = cost.chunk(length - 1, length)
    while (bounds := _longest_first(length, count, max_tokens, cost, low + margin)) is None:
        low, margin = low + margin, 4 * margin
    high = low + margin
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        cheaper = _longest_first(length, count, max_tokens, cost, middle)
        if cheaper is None:
            low = middle
        else:
            bounds, high = cheaper, middle
    return bounds


def _longest_first(
    length: int, count: int, max_tokens: int, cost: CostModel, max_cost: float
) -> tuple[int, ...] | None:
    """Return the bounds of chunks that are as long as `max_cost` and `max_tokens` allow, starting at the first token.

    Returns None if more than `count` chunks would be needed.
    """
    bounds = [0]
    while bounds[-1] < length and len(bounds) <= count:
        end = min(_reach(bounds[-1], cost, max_cost, length), bounds[-1] + max_tokens)
        if end <= bounds[-1]:
            return None
        bounds.append(end)
    return tuple(bounds) if bounds[-1] == length else None


def _reach(begin: int, cost: CostModel, max_cost: float, length: int) -> int:
    """Return the largest end, at most `length`, of a chunk that begins at `begin` and costs at most `max_cost`."""
    # chunk_factor * (linear * (e - b) + quadratic * (e² - b²)) = max_cost, solved for e, without cancellation.
    total = max_cost / cost.chunk_factor + cost.linear * begin + cost.quadratic * begin * begin
    if max_cost <= 0:
        return begin
    root = math.sqrt(cost.linear * cost.linear + 4 * cost.quadratic * total)
    end = min(int(2 * total / (cost.linear + root)), length)
    # The root is rounded, so correct the end using the cost itself.
    while end > begin and cost.chunk(begin, end) > max_cost:
        end -= 1
    while end < length and cost.chunk(begin, end + 1) <= max_cost:
        end += 1
    return end

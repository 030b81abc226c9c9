"""Which sequences of a minibatch are too long for one rank, and which ranks share them: context parallelism on demand.

A minibatch cannot end before its longest sequence. So the sequences above some cost are cut into pieces of equal cost
(`data.plan.chunks`), each piece for another rank, and only these ranks wait for each other. Megatron's hybrid context
parallelism (Megatron-LM, `hybrid_cp_schedule.py`) and ByteScale's hybrid data parallelism (arXiv 2502.21231) do so with
groups that meet in collectives; here any number of ranks shares a sequence, also an odd one, and no other rank knows.

    1. pieces    each rank runs its pieces in the order of `Plan.splits`, the same order on all ranks. All ranks leave
                 point B together, so the pieces of a sequence begin together.
    2. tickets   whoever has run its pieces draws microbatches of whole sequences, which evens out what pieces cost.

Nothing deadlocks: a piece waits for pieces of its own sequence only, and of all unfinished sequences the first in the
common order is on ranks that have nothing before it.

From which cost on, and into how many pieces: several costs are tried, each sequence above is cut into as few pieces as
bring it below, and the plan that ends earliest is taken, on equal ranks and on ranks whose speeds differ. Pieces cost
more than their part (`CostModel.piece`), so nothing is cut where whole sequences end about as early.

All of it is local: only arithmetic in a fixed order decides, so every rank computes the same plan.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from odc_mpi.data.plan.balance import Costs, Lengths, Plan, check_fit, dynamic
from odc_mpi.data.plan.chunks import SequenceSplit, even_bounds
from odc_mpi.data.plan.cost import CostModel
from odc_mpi.data.plan.dynamic_packing import SPREADS, SequenceIndices, makespan, pack_pool
from odc_mpi.data.plan.partition import argsort_descending
from odc_mpi.errors import UserError

ChunkCounts = npt.NDArray[np.int64]

#: Costs from which on sequences are cut, in even shares of the minibatch's cost: the lowest, and the ratio of one to
#: the next, up to the costliest sequence.
MIN_THRESHOLD, THRESHOLD_RATIO = 0.4, 1.06
#: So many pieces at most, or so many for each rank, are looked at, unless it takes more of them to fit: planning with
#: thousands takes long and gains nothing.
MAX_CHUNKS, MAX_CHUNKS_PER_RANK = 64, 2
#: So many of the most promising plans are made in full.
NUM_FINALISTS = 3
#: Cutting has to end the minibatch so much earlier: not for a gain as small as what costs are wrong by.
MAX_RELATIVE_TIME = 0.98


def split_longest(lengths: Lengths, size: int, max_tokens: int, cost: CostModel, whole: Plan | None = None) -> Plan:
    """Cut the sequences that are too long for an even share, and leave all others to be drawn. A `balance.BalanceStrategy`, like those listed in `balance.BALANCE_STRATEGIES`.

    Args:
        lengths: Length in tokens of each sequence of the minibatch, int64 [n]. A sequence may be longer than
            `max_tokens` if its pieces fit.
        size: Number of ranks.
        max_tokens: The most tokens in a microbatch, and in a piece.
        cost: Cost to balance; `CostModel.piece` says what a piece costs.
        whole: The plan of `balance.dynamic`, if it is known.

    Returns:
        `splits` and `pool`; a sequence is in exactly one of them. The plan of `balance.dynamic` if cutting gains
        nothing.

    Raises:
        UserError: A sequence is longer than `size` pieces of `max_tokens`.
    """
    check_chunks_fit(lengths, size, max_tokens)
    planner = _Planner(lengths, size, max_tokens, cost)
    best: Plan | None = None
    earliest = math.inf
    if not len(lengths) or int(lengths.max()) <= max_tokens:
        best = whole or dynamic(lengths, size, max_tokens, cost)
        earliest = MAX_RELATIVE_TIME * planner.estimate_end(best)
    if best and (size == 1 or earliest <= planner.even_end()):
        return best
    for estimate, counts in planner.promising():
        if estimate >= earliest:  # and planning takes long
            break
        plan = planner.plan(counts)
        end = planner.estimate_end(plan)
        if end < earliest:
            best, earliest = plan, end
    assert best is not None
    return best


def check_chunks_fit(lengths: Lengths, size: int, max_tokens: int) -> None:
    """Refuse sequences whose pieces fit into no microbatch on so many ranks.

    Raises:
        UserError: A sequence is longer than `size` times `max_tokens`; the message names the first.
    """
    if size == 1:
        check_fit(lengths, max_tokens)
    too_long = np.flatnonzero(lengths > size * max_tokens)
    if len(too_long):
        index = too_long[0]
        raise UserError(
            f"expected sequences of at most {size * max_tokens} tokens, {size} pieces of {max_tokens}, got "
            f"{lengths[index]} in sequence {index} ({len(too_long)} of {len(lengths)} are longer): raise "
            "data.max_tokens_per_microbatch, or take more ranks"
        )


class _Planner:
    """Plans of one minibatch, and when they end. Numbers of pieces, `counts`, are of each sequence, int64 [n]."""

    def __init__(self, lengths: Lengths, size: int, max_tokens: int, cost: CostModel) -> None:
        self._lengths, self._size, self._max_tokens, self._cost = lengths, size, max_tokens, cost
        self._costs = cost.sequence(lengths)
        self._fewest = -(-lengths // max_tokens)

    def even_end(self) -> float:
        """Return the end of all ranks, summed over `SPREADS`, if all work were shared out evenly."""
        fewest = -(-int(self._lengths.sum()) // self._max_tokens)
        return len(SPREADS) * (math.fsum(self._costs.tolist()) + fewest * self._cost.constant) / self._size

    def promising(self) -> list[tuple[float, ChunkCounts]]:
        """Return the numbers of pieces with which the minibatch seems to end earliest, and when, the best first."""
        tried = list({counts.tobytes(): counts for counts in self._candidates()}.values())
        ends = [self._estimate(counts) for counts in tried]
        return [(ends[i], tried[i]) for i in argsort_descending(-np.array(ends))[:NUM_FINALISTS]]

    def plan(self, counts: ChunkCounts) -> Plan:
        """Cut sequences into so many pieces, give these to ranks, and leave the rest to be drawn."""
        split_sequences = [
            (i, even_bounds(int(self._lengths[i]), int(counts[i]), self._max_tokens, self._cost))
            for i in np.flatnonzero(counts > 1).tolist()
        ]
        split_sequences.sort(key=lambda cut: -self._costliest(cut[1]))  # equal ones by their position
        gangs, _ = self._assign_ranks(
            [(len(bounds) - 1, self._costliest(bounds)) for _, bounds in split_sequences], 0.0
        )
        splits = tuple(
            SequenceSplit(i, bounds, ranks) for (i, bounds), ranks in zip(split_sequences, gangs, strict=True)
        )
        rest = np.flatnonzero(counts == 1)
        pool: tuple[SequenceIndices, ...] = ()
        if len(rest):
            available_at = [self._available_at(splits, spread) for spread in SPREADS]
            remaining = self._lengths[rest], self._costs[rest]
            pool = pack_pool(*remaining, self._max_tokens, self._cost.constant, self._size, available_at)
        positions = rest.tolist()
        named_pool = tuple(tuple(positions[k] for k in microbatch) for microbatch in pool)
        return Plan(((),) * self._size, named_pool, splits)

    def estimate_end(self, plan: Plan) -> float:
        """Return the end of the last rank, summed over `SPREADS`."""
        work = [self._cost.constant + math.fsum(self._costs[list(indices)].tolist()) for indices in plan.pool]
        return math.fsum(
            makespan(work, self._size, spread, self._available_at(plan.splits, spread)) for spread in SPREADS
        )

    def _candidates(self) -> Iterator[ChunkCounts]:
        """Yield numbers of pieces that bring every sequence below some cost."""
        constant, factor = self._cost.constant, self._cost.piece_factor
        # Of the tokens before a piece, half of the sequence in the mean.
        chunk_costs = factor * self._costs + self._cost.earlier * self._lengths / 2
        max_cost = self.even_end() / len(SPREADS) * MIN_THRESHOLD
        while True:
            requested = np.ceil(chunk_costs / max(max_cost - constant, 1e-3 * max_cost)).astype(np.int64)
            counts = np.where(self._costs + constant > max_cost, np.maximum(requested, 2), 1)
            counts = np.clip(counts, self._fewest, np.minimum(self._size, self._lengths))
            has_to = (self._fewest > 1).any()
            if has_to or counts[counts > 1].sum() <= max(MAX_CHUNKS, MAX_CHUNKS_PER_RANK * self._size):
                yield counts
            if (counts == self._fewest).all():
                break
            max_cost *= THRESHOLD_RATIO

    def _estimate(self, counts: ChunkCounts) -> float:
        """Return about the end of the last rank, summed over `SPREADS`, if every whole sequence is drawn by itself."""
        is_cut = counts > 1
        before = self._cost.earlier * self._lengths * (counts - 1) / 2
        chunk_costs = (self._cost.piece_factor * self._costs + before) / counts + self._cost.constant
        order = [i for i in argsort_descending(chunk_costs) if is_cut[i]]
        each = list(zip(counts[order].tolist(), chunk_costs[order].tolist(), strict=True))
        rest = -np.sort(-self._costs[~is_cut])
        return math.fsum(makespan(rest, self._size, spread, self._assign_ranks(each, spread)[1]) for spread in SPREADS)

    def _available_at(self, splits: tuple[SequenceSplit, ...], spread: float) -> Costs:
        """Return the end of each rank's pieces, float64 [size]."""
        return self._assign_ranks([(len(split.ranks), self._costliest(split.bounds)) for split in splits], spread)[1]

    def _assign_ranks(self, chunks: list[tuple[int, float]], spread: float) -> tuple[list[tuple[int, ...]], Costs]:
        """Give pieces to the ranks that are free first; those of a sequence begin together and end with the slowest.

        Args:
            chunks: For each sequence how many, and the cost of one.
            spread: As that of `makespan`.

        Returns:
            The ranks of each sequence, and when each rank is free, float64 [size].
        """
        free, ranks, used = np.zeros(self._size), [], 0
        for count, each in chunks:
            # As long as there are unused ranks for all pieces, side by side, so mostly on one node.
            fresh = used + count <= self._size
            chosen = np.arange(used, used + count) if fresh else np.argsort(free, kind="stable")[:count]
            used += count
            # Of so many speeds, evenly spread, the slowest: the mean of the largest of uniform numbers.
            slowness = 1 + spread * (count - 1) / (count + 1)
            free[chosen] = free[chosen].max() + each * slowness
            ranks.append(tuple(chosen.tolist()))
        return ranks, free

    def _costliest(self, bounds: tuple[int, ...]) -> float:
        return self._cost.constant + max(self._cost.chunk(begin, end) for begin, end in pairwise(bounds))

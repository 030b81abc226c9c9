"""Balance: which sequences of a minibatch form which microbatch, on which rank.

Pure planning. A plan depends on nothing that differs between ranks, and ties are broken by index, so every rank
computes the same plan and nothing is communicated. All functions have one signature and are listed in `BALANCE_STRATEGIES`.

    local_sort   no balance: what LongAlign does, a point of comparison
    lb_micro     equal numbers of microbatches, even in each turn: for collectives
    lb_mini      equal work for each rank in any number of microbatches: for windows
    dynamic      microbatches that ranks draw when they are free: for windows
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odc_mpi.data.plan.chunks import SequenceSplit
from odc_mpi.data.plan.cost import CostModel
from odc_mpi.data.plan.dynamic_packing import SequenceIndices, pack_pool
from odc_mpi.data.plan.partition import argsort_descending, first_fit, partition, partition_evenly
from odc_mpi.errors import UserError

Lengths = npt.NDArray[np.int64]
Costs = npt.NDArray[np.float64]
#: Plans a minibatch, given
#:     the length in tokens of each of its sequences, int64 [n],
#:     the number of ranks, also more than there are sequences,
#:     the most tokens in a microbatch,
#:     the cost to balance.
#: Local. Raises a `UserError` if a sequence is longer than a microbatch may be.
BalanceStrategy = Callable[[Lengths, int, int, CostModel], "Plan"]


@dataclass(frozen=True)
class Plan:
    """The microbatches of a minibatch, and the ranks that run them.

    Attributes:
        microbatches: For each rank its microbatches in order, each a tuple of positions in the minibatch. Ranks may
            have different numbers of microbatches, also none. An empty microbatch is skipped where ranks do not meet
            in microbatches, and run as padding where they do.
        pool: Microbatches without a rank: a free rank draws the next. None of them is empty.
        splits: Sequences cut into pieces, each for a rank of its own, in the order in which every rank runs its pieces;
            before all microbatches. They are in no microbatch. See `data.plan.context_parallel`.
    """

    microbatches: tuple[tuple[SequenceIndices, ...], ...]
    pool: tuple[SequenceIndices, ...] = ()
    splits: tuple[SequenceSplit, ...] = ()


def local_sort(lengths: Lengths, size: int, max_tokens: int, cost: CostModel) -> Plan:
    """Deal sequences to ranks in turn; each rank runs its own by falling length, one per microbatch.

    The LocalSort of ODC (arXiv 2601.19362), which takes it from LongAlign (arXiv 2401.18058): no balance between
    ranks, but the first microbatch shows the highest need of memory.

    Local; see `BalanceStrategy`. The cost is unused: the sort is by length.
    """
    check_fit(lengths, max_tokens)
    microbatches: list[list[SequenceIndices]] = [[] for _ in range(size)]
    for i in argsort_descending(lengths):
        microbatches[i % size].append((i,))
    return Plan(tuple(map(tuple, microbatches)))


def lb_micro(lengths: Lengths, size: int, max_tokens: int, cost: CostModel) -> Plan:
    """Give every rank as many sequences and as many microbatches as any other, of even cost in each turn.

    The LB-Micro of ODC (arXiv 2601.19362), which is verl's balanced batching, for collectives: all ranks run their k-th
    microbatches together and wait for the costliest. Sequences are dealt out by differencing
    with equal counts; each rank splits its own by differencing, too, into the number of microbatches that the rank
    with the most of them needs, and runs them by falling cost. Where differencing overfills a microbatch verl tries one
    more of them; here the split falls back to packing, which keeps their number at the least that packing finds.

    Local; see `BalanceStrategy`.

    Returns:
        The same number of microbatches for each rank; a rank with fewer sequences than that ends with empty ones.
    """
    check_fit(lengths, max_tokens)
    costs = cost.sequence(lengths)
    parts = partition_evenly(costs.tolist(), size)
    packed = [first_fit(lengths[part], max_tokens) for part in parts]
    count = max(map(len, packed))
    return Plan(
        tuple(_split(part, bins, count, lengths, max_tokens, costs) for part, bins in zip(parts, packed, strict=True))
    )


def lb_mini(lengths: Lengths, size: int, max_tokens: int, cost: CostModel) -> Plan:
    """Give every rank the same total cost, then let each pack its own sequences into few microbatches.

    The LB-Mini of ODC (arXiv 2601.19362): ranks that need not meet between microbatches need no equal number of them.
    Ranks are balanced with the largest differencing method, microbatches are packed first-fit decreasing and run by
    falling cost, so that memory peaks at once and the last, shortest work evens out.

    Local; see `BalanceStrategy`.
    """
    check_fit(lengths, max_tokens)
    costs = cost.sequence(lengths)
    parts = partition(costs.tolist(), size)
    return Plan(tuple(_to_positions(part, first_fit(lengths[part], max_tokens), costs) for part in parts))


def dynamic(lengths: Lengths, size: int, max_tokens: int, cost: CostModel) -> Plan:
    """Cut microbatches for free ranks to draw, the costliest first.

    List scheduling by falling cost (Graham, "Bounds on multiprocessing timing anomalies", 1969), done while the
    minibatch runs: a rank that is slow, or whose work was estimated too low, draws less. `data.plan.dynamic_packing` says how the
    microbatches are made: large ones, and a tail of small ones.

    Local; see `BalanceStrategy`.

    Returns:
        All microbatches in the pool, none fixed to a rank.
    """
    check_fit(lengths, max_tokens)
    costs = cost.sequence(lengths)
    return Plan(((),) * size, pack_pool(lengths, costs, max_tokens, cost.constant, size) if len(lengths) else ())


BALANCE_STRATEGIES: dict[str, BalanceStrategy] = {
    "local_sort": local_sort,
    "lb_micro": lb_micro,
    "lb_mini": lb_mini,
    "dynamic": dynamic,
}


def check_fit(lengths: Lengths, max_tokens: int) -> None:
    """Refuse sequences that fit into no microbatch.

    Raises:
        UserError: A sequence is longer than `max_tokens`; the message names the first.
    """
    too_long = np.flatnonzero(lengths > max_tokens)
    if len(too_long):
        index = too_long[0]
        raise UserError(
            f"expected sequences of at most {max_tokens} tokens, got {lengths[index]} in sequence {index} "
            f"({len(too_long)} of {len(lengths)} are longer): raise data.max_tokens_per_microbatch, or prepare with "
            "--max-length"
        )


def _split(
    part: list[int], packed: list[list[int]], count: int, lengths: Lengths, max_tokens: int, costs: Costs
) -> tuple[SequenceIndices, ...]:
    """Split a rank's sequences into so many microbatches of even cost, costliest first; `packed` is known to fit."""
    part_lengths, part_costs = lengths[part], costs[part]
    bins = partition(part_costs.tolist(), count)
    tokens = part_lengths.tolist()
    if any(sum(tokens[i] for i in indices) > max_tokens for indices in bins):
        bins = _spread(part_lengths, part_costs, max_tokens, count) or packed
    bins = [indices for indices in bins if indices]
    while len(bins) < min(count, len(part)):
        # Nothing stays empty while somebody has two: the costliest gives up its cheapest.
        fullest = max((indices for indices in bins if len(indices) > 1), key=lambda own: float(part_costs[own].sum()))
        bins.append([fullest.pop(int(np.argmin(part_costs[fullest])))])
    return _to_positions(part, bins, costs) + ((),) * (count - len(bins))


def _spread(lengths: Lengths, costs: Costs, max_tokens: int, count: int) -> list[list[int]] | None:
    """Give each sequence, costliest first, to the cheapest of so many microbatches that has room; None if none has."""
    free_tokens, load = np.full(count, max_tokens), np.zeros(count)
    bins: list[list[int]] = [[] for _ in range(count)]
    for i in argsort_descending(costs):
        slot = int(np.argmin(np.where(free_tokens >= lengths[i], load, np.inf)))
        if free_tokens[slot] < lengths[i]:
            return None
        bins[slot].append(i)
        free_tokens[slot] -= lengths[i]
        load[slot] += costs[i]
    return bins


def _to_positions(part: list[int], bins: list[list[int]], costs: Costs) -> tuple[SequenceIndices, ...]:
    """Name bins of positions in `part` by what stands there, costliest first, equal ones by their lowest position."""
    each = costs[part].tolist()
    found = [(-math.fsum([each[i] for i in indices]), tuple([part[i] for i in indices])) for indices in bins]
    return tuple(indices for _, indices in sorted(found, key=lambda bin_: (bin_[0], min(bin_[1]))))

"""Balance: which sequences of a minibatch form which microbatch, on which rank.

Pure planning. A plan depends on nothing that differs between ranks, and ties are broken by index, so every rank
computes the same plan and nothing is communicated. All functions have one signature and are listed in `BALANCES`.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from odc_mpi.data.cost import Cost
from odc_mpi.errors import UserError

Lengths = npt.NDArray[np.int64]
Balance = Callable[[Lengths, int, int, Cost], "Plan"]

# A bin of the differencing method: (minus its cost, its lowest index, its contents as nested pairs of indices). As
# tuples they sort by falling cost, and the index, unique to the bin, keeps the contents from ever being compared.
_Bin = tuple[float, int, Any]


@dataclass(frozen=True)
class Plan:
    """Who computes what in a minibatch.

    Attributes:
        microbatches: For each rank its microbatches in order, each a tuple of positions in the minibatch. Ranks may
            have different numbers of microbatches, also none.
    """

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]


def local_sort(lengths: Lengths, size: int, max_tokens: int, cost: Cost) -> Plan:
    """Deal sequences to ranks in turn; each rank runs its own by falling length, one per microbatch.

    The LocalSort of ODC (arXiv 2601.19362), which takes it from LongAlign (arXiv 2401.18058): no balance between
    ranks, but the first microbatch shows the highest need of memory.

    Local.

    Args:
        lengths: Length in tokens of each sequence of the minibatch, int64 [n].
        size: Number of ranks.
        max_tokens: The most tokens in a microbatch.
        cost: Unused: the sort is by length.

    Raises:
        UserError: A sequence is longer than `max_tokens`.
    """
    check_fit(lengths, max_tokens)
    order = _by_falling(lengths)
    return Plan(tuple(tuple((i,) for i in order if i % size == rank) for rank in range(size)))


def lb_mini(lengths: Lengths, size: int, max_tokens: int, cost: Cost) -> Plan:
    """Give every rank the same total cost, then let each pack its own sequences into few microbatches.

    The LB-Mini of ODC (arXiv 2601.19362): ranks that need not meet between microbatches need no equal number of them.
    Ranks are balanced with the largest differencing method, microbatches are packed first-fit decreasing and run by
    falling cost, so that memory peaks at once and the last, shortest work evens out.

    Local.

    Args:
        lengths: Length in tokens of each sequence of the minibatch, int64 [n].
        size: Number of ranks. With fewer sequences than ranks some ranks get nothing.
        max_tokens: The most tokens in a microbatch.
        cost: What is balanced.

    Raises:
        UserError: A sequence is longer than `max_tokens`.
    """
    check_fit(lengths, max_tokens)
    costs = cost.sequence(lengths)
    parts = partition(costs.tolist(), size)
    return Plan(tuple(_pack(part, lengths, max_tokens, costs) for part in parts))


BALANCES: dict[str, Balance] = {"local_sort": local_sort, "lb_mini": lb_mini}


def check_fit(lengths: Lengths, max_tokens: int) -> None:
    """Refuse sequences that fit into no microbatch.

    Local.

    Raises:
        UserError: Names the first sequence that is longer than `max_tokens`.
    """
    too_long = np.flatnonzero(lengths > max_tokens)
    if len(too_long):
        index = too_long[0]
        raise UserError(
            f"expected sequences of at most {max_tokens} tokens, got {lengths[index]} in sequence {index} "
            f"({len(too_long)} of {len(lengths)} are longer): raise data.max_tokens_per_microbatch, or prepare with "
            "--max-length"
        )


def partition(costs: Sequence[float], size: int) -> list[list[int]]:
    """Split indices into parts of nearly equal cost with the largest differencing method.

    Karmarkar and Karp, "The differencing method of set partitioning" (Berkeley report UCB/CSD 82/113, 1982), for any
    number of parts: start with one partial split per item, and keep joining the two whose largest and smallest bins
    differ most, the largest bin of one to the smallest of the other, until one split is left. Bins without items are
    not stored, which keeps the first joins short.

    Local.

    Args:
        costs: Cost of each item, at least 0.
        size: Number of parts.

    Returns:
        `size` lists of sorted indices, the list of the largest cost first; an index is in exactly one.
    """
    heap = [(-cost, serial, [(-cost, serial, serial)]) for serial, cost in enumerate(costs)]
    if size == 1 or not heap:
        return [list(range(len(costs)))] + [[] for _ in range(size - 1)]
    heapq.heapify(heap)
    serial = len(heap)  # equal differences: the older split first
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        joined = _join(one, heap[0][2], size)
        heapq.heapreplace(heap, (_difference(joined, size), serial, joined))
        serial += 1
    bins = heap[0][2]
    return [_flatten(contents) for _, _, contents in bins] + [[] for _ in range(size - len(bins))]


def _join(one: list[_Bin], other: list[_Bin], size: int) -> list[_Bin]:
    """Join two splits, largest bins to smallest; empty bins, not stored, are the smallest."""
    num_shared = max(0, len(one) + len(other) - size)  # pairs of bins where neither is empty
    apart = len(one) - num_shared
    bins = one[:apart] + other[: len(other) - num_shared]
    for a, b in zip(one[apart:], reversed(other), strict=False):
        bins.append((a[0] + b[0], min(a[1], b[1]), (a[2], b[2])))
    bins.sort()
    return bins


def _difference(bins: list[_Bin], size: int) -> float:
    """Return smallest minus largest bin, the key of a heap that yields the largest difference first."""
    smallest = -bins[-1][0] if len(bins) == size else 0.0
    return bins[0][0] + smallest


def _flatten(contents: Any) -> list[int]:
    """Return the indices in nested pairs, sorted; without recursion, since the nesting can be thousands deep."""
    stack, indices = [contents], []
    while stack:
        item = stack.pop()
        if isinstance(item, tuple):
            stack.extend(item)
        else:
            indices.append(item)
    return sorted(indices)


def _pack(
    part: list[int], lengths: Lengths, max_tokens: int, costs: npt.NDArray[np.float64]
) -> tuple[tuple[int, ...], ...]:
    """Pack a rank's sequences first-fit decreasing: at most 11/9 of the fewest microbatches, plus 6/9 (Dósa 2007)."""
    members = np.asarray(part, dtype=np.int64)
    room = np.full(len(part), max_tokens, dtype=np.int64)
    packs: list[list[int]] = []
    for i in members[_by_falling(lengths[members])].tolist():
        # One more than the packs in use: an unused one always fits.
        slot = int(np.argmax(room[: len(packs) + 1] >= lengths[i]))
        if slot == len(packs):
            packs.append([])
        packs[slot].append(i)
        room[slot] -= lengths[i]
    packs.sort(key=lambda pack: (-costs[pack].sum(), pack[0]))
    return tuple(map(tuple, packs))


def _by_falling(values: npt.NDArray[Any]) -> list[int]:
    """Return the indices by falling value, equal ones by index."""
    return np.argsort(-values, kind="stable").tolist()

"""Balance strategies: functions that assign the sequences of a minibatch to microbatches, and microbatches to ranks.

Every rank computes the same plan, because plans depend only on values that are equal on all ranks, and ties are broken
by index.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from odc_mpi.data.plan.cost import CostModel
from odc_mpi.data.plan.dynamic_packing import SequenceIndices, pack_pool
from odc_mpi.data.plan.partition import argsort_descending, first_fit, partition, partition_evenly
from odc_mpi.errors import UserError
from odc_mpi.formatting import did_you_mean

Lengths = npt.NDArray[np.int64]
Costs = npt.NDArray[np.float64]
#: Function that plans a minibatch. The arguments are the sequence lengths in tokens, int64 [n]; the number of ranks;
#: the maximum number of tokens in a microbatch, which no sequence may exceed (see `check_fit`); and the cost model.
BalanceStrategy = Callable[[Lengths, int, int, CostModel], "Plan"]
#: Number of sequences per rank that `rank_independent_packing` assumes.
SEQUENCES_PER_RANK = 4
#: Number of microbatches for each rank into which `pack_rows` divides a minibatch, and the smallest share of tokens in
#: a row of a microbatch.
ROWS_PER_RANK, MIN_ROW_SHARE = 4, 0.75


@dataclass(frozen=True)
class SequenceSplit:
    """A sequence that is split into chunks on different ranks. Chunk `i` contains the tokens `bounds[i]:bounds[i + 1]`.

    Attributes:
        position: Position of the sequence in the minibatch.
        bounds: Bounds of the chunks in tokens, [num_chunks + 1], increasing from 0 to the length of the sequence.
        ranks: Rank of each chunk, [num_chunks]. No rank occurs twice.
    """

    position: int
    bounds: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Assignment of a minibatch's sequences to microbatches, and of the microbatches to ranks.

    Attributes:
        microbatches: Each rank's microbatches, in the order in which they run. Each microbatch is a tuple of its
            sequences' positions in the minibatch. Empty microbatches are skipped, or replaced by dummy microbatches if
            ranks synchronize in each microbatch.
        pool: Nonempty microbatches, which idle ranks claim in this order.
        splits: Sequences that are split into chunks on several ranks. Each rank runs its chunks in this order, before
            its microbatches. See `data.plan.context_parallel`.
    """

    microbatches: tuple[tuple[SequenceIndices, ...], ...]
    pool: tuple[SequenceIndices, ...] = ()
    splits: tuple[SequenceSplit, ...] = ()


def local_sort(lengths: Lengths, size: int, max_tokens: int, cost: CostModel) -> Plan:
    """Sort the sequences by decreasing length, and assign them to ranks round-robin, one sequence per microbatch.

    This is LocalSort from ODC (arXiv 2601.19362), adopted from LongAlign (arXiv 2401.18058). Ranks are not balanced.
    """
    microbatches: list[list[SequenceIndices]] = [[] for _ in range(size)]
    for i in argsort_descending(lengths):
        microbatches[i % size].append((i,))
    return Plan(tuple(map(tuple, microbatches)))


def lb_micro(
    lengths: Lengths,
    size: int,
    max_tokens: int,
    cost: CostModel,
    pack: Callable[[Lengths, int], list[list[int]]] = first_fit,
) -> Plan:
    """Assign equally many microbatches to each rank, so that the k-th microbatches of all ranks cost about the same.

    This is LB-Micro from ODC (arXiv 2601.19362), which is verl's balanced batching, for training with collectives.
    Sequences are first divided among the ranks (see `partition_evenly`), then among each rank's microbatches, which run
    in order of decreasing cost, with empty ones last. The number of microbatches is that of the rank that needs the
    most when its sequences are packed with `pack`. If microbatches of equal cost would exceed `max_tokens`, verl adds a
    microbatch on all ranks, whereas this function packs the sequences less evenly.
    """
    costs = cost.sequence(lengths)
    parts = partition_evenly(costs.tolist(), size)
    packed = [pack(lengths[part], max_tokens) for part in parts]
    count = max(map(len, packed))
    return Plan(
        tuple(_split(part, bins, count, lengths, max_tokens, costs) for part, bins in zip(parts, packed, strict=True))
    )


def lb_mini(lengths: Lengths, size: int, max_tokens: int, cost: CostModel) -> Plan:
    """Assign about the same total cost to each rank, and pack each rank's sequences into few microbatches.

    This is LB-Mini from ODC (arXiv 2601.19362). Sequences are divided among the ranks with the largest differencing
    method (`partition`), then packed by first-fit decreasing. Each rank runs its microbatches in order of decreasing
    cost, so that memory usage peaks early.
    """
    costs = cost.sequence(lengths)
    parts = partition(costs.tolist(), size)
    return Plan(tuple(_to_positions(part, first_fit(lengths[part], max_tokens), costs) for part in parts))


def dynamic(lengths: Lengths, size: int, max_tokens: int, cost: CostModel) -> Plan:
    """Pack the sequences into microbatches that idle ranks claim from `Plan.pool`, costliest first.

    This is list scheduling by decreasing cost (Graham, "Bounds on multiprocessing timing anomalies", 1969) at run time.
    See `data.plan.dynamic_packing`.
    """
    costs = cost.sequence(lengths)
    return Plan(((),) * size, pack_pool(lengths, costs, max_tokens, cost.constant, size))


BALANCE_STRATEGIES: dict[str, BalanceStrategy] = {
    "local_sort": local_sort,
    "lb_micro": lb_micro,
    "lb_mini": lb_mini,
    "dynamic": dynamic,
}


def rank_independent_packing(
    name: str, packing_cost: CostModel, *, packs: bool = True, rows_per_rank: int | None = None
) -> BalanceStrategy:
    """Return a balance strategy whose microbatches are the same for any number of ranks, except with `rows_per_rank`.

    Microbatches are formed with the constant `packing_cost`. If `packs` is False or `name` is "local_sort", each
    contains one sequence or, with `rows_per_rank` (`ROWS_PER_RANK`, or 0), several (`pack_rows`). The strategy's
    argument `cost` affects only the assignment to ranks. Raises a `UserError` if `name` is "lb_micro".
    """

    def pack(lengths: Lengths, size: int, max_tokens: int) -> tuple[SequenceIndices, ...]:
        count = math.ceil(len(lengths) / SEQUENCES_PER_RANK)
        if packs:
            return pack_pool(lengths, packing_cost.sequence(lengths), max_tokens, packing_cost.constant, count)
        if rows_per_rank is None:
            return tuple((i,) for i in range(len(lengths)))
        return pack_rows(lengths, max_tokens, rows_per_rank * size or count)

    def assign(lengths: Lengths, size: int, max_tokens: int, cost: CostModel) -> Plan:
        microbatches = pack(lengths, size, max_tokens)
        costs = _costs(microbatches, lengths, cost)
        parts = [sorted(part, key=lambda i: (-costs[i], i)) for part in partition(costs.tolist(), size)]
        return Plan(tuple(tuple(microbatches[i] for i in part) for part in parts))

    def pool(lengths: Lengths, size: int, max_tokens: int, cost: CostModel) -> Plan:
        microbatches = pack(lengths, size, max_tokens)
        order = argsort_descending(_costs(microbatches, lengths, cost))
        return Plan(((),) * size, tuple(microbatches[i] for i in order))

    strategies = {"lb_mini": assign, "dynamic": pool, "local_sort": local_sort}
    if name not in strategies:
        raise UserError(
            f"data.balance: the microbatches of {name} depend on the number of ranks, which run.exact excludes: set it "
            "to lb_mini or dynamic, or run.exact to false"
        )
    return strategies[name]


def pack_rows(lengths: Lengths, max_tokens: int, count: int) -> tuple[SequenceIndices, ...]:
    """Group sequences of like length into about `count` microbatches, or more, of at most `max_tokens` padded tokens.

    Each sequence has at least the share `MIN_ROW_SHARE` of the tokens of the longest one in its microbatch.
    """
    target, bins, longest = math.ceil(lengths.sum() / max(1, count)), list[list[int]](), 0
    for i in argsort_descending(lengths):
        fits = bool(bins) and longest * (len(bins[-1]) + 1) <= min(target + longest // 2, max_tokens)
        if fits and lengths[i] >= MIN_ROW_SHARE * longest:
            bins[-1].append(i)
        else:
            bins.append([i])
            longest = int(lengths[i])
    return tuple(map(tuple, bins))


def find_strategy(name: str, cost: CostModel, *, exact: bool, packs: bool, rows: bool = False) -> BalanceStrategy:
    """Return the balance strategy called `name`. For the other arguments and the errors, see `data.loader.Loader`."""
    if name not in BALANCE_STRATEGIES:
        hint = did_you_mean(name, BALANCE_STRATEGIES)
        raise UserError(f"expected data.balance among {', '.join(BALANCE_STRATEGIES)}, got {name!r}{hint}")
    if name == "lb_micro" and not packs:
        return partial(lb_micro, pack=lambda lengths, _: [[i] for i in range(len(lengths))])
    if packs and not exact:
        return BALANCE_STRATEGIES[name]
    rows_per_rank = (0 if exact else ROWS_PER_RANK) if rows and not packs else None
    return rank_independent_packing(name, cost, packs=packs, rows_per_rank=rows_per_rank)


def divide(costs: Costs, num_parts: int, number: int) -> list[list[int]]:
    """Divide the sequences of minibatch `number` into parts with about equal sums of `costs`, float64 [n].

    Returns the positions of the sequences in each part, in ascending order. The parts rotate with `number`. If there
    are fewer sequences than parts, some parts contain the same sequence.
    """
    parts = [part for part in partition(costs.tolist(), num_parts) if part]
    return [parts[(index - number) % num_parts % len(parts)] for index in range(num_parts)]


def check_fit(lengths: Lengths, max_tokens: int, max_chunks: int = 1) -> None:
    """Raise a `UserError` if a sequence has more than `max_chunks * max_tokens` tokens."""
    too_long = np.flatnonzero(lengths > max_chunks * max_tokens)
    if len(too_long):
        index = too_long[0]
        chunks = f" {max_chunks} chunks of {max_tokens}," if max_chunks > 1 else ""
        raise UserError(
            f"expected sequences of at most {max_chunks * max_tokens} tokens,{chunks} got {lengths[index]} in sequence "
            f"{index} ({len(too_long)} of {len(lengths)} are longer): raise data.max_tokens_per_microbatch, or "
            + ("use more ranks" if max_chunks > 1 else "prepare with --max-length")
        )


def _split(
    part: list[int], packed: list[list[int]], count: int, lengths: Lengths, max_tokens: int, costs: Costs
) -> tuple[SequenceIndices, ...]:
    """Split the sequences of a rank into `count` microbatches of about equal cost; `packed` is the fallback."""
    part_lengths, part_costs = lengths[part], costs[part]
    bins = partition(part_costs.tolist(), count)
    tokens = part_lengths.tolist()
    if any(sum(tokens[i] for i in indices) > max_tokens for indices in bins):
        bins = _spread(part_lengths, part_costs, max_tokens, count) or packed
    bins = [indices for indices in bins if indices]
    while len(bins) < min(count, len(part)):
        # Fill an empty microbatch with the cheapest sequence of the costliest microbatch that has several.
        fullest = max((indices for indices in bins if len(indices) > 1), key=lambda bin_: float(part_costs[bin_].sum()))
        bins.append([fullest.pop(int(np.argmin(part_costs[fullest])))])
    return _to_positions(part, bins, costs) + ((),) * (count - len(bins))


def _spread(lengths: Lengths, costs: Costs, max_tokens: int, count: int) -> list[list[int]] | None:
    """Assign each sequence, costliest first, to the cheapest microbatch with enough space. Returns None if none has."""
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
    """Convert bins of indices into `part` to bins of positions, costliest first. Ties are broken by lowest position."""
    each = costs[part].tolist()
    pairs = [(-math.fsum([each[i] for i in indices]), tuple([part[i] for i in indices])) for indices in bins]
    return tuple(indices for _, indices in sorted(pairs, key=lambda pair: (pair[0], min(pair[1]))))


def _costs(microbatches: tuple[SequenceIndices, ...], lengths: Lengths, cost: CostModel) -> Costs:
    each = cost.sequence(lengths).tolist()
    return np.array([cost.constant + math.fsum(each[i] for i in indices) for indices in microbatches])

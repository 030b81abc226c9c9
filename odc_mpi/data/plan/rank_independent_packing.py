"""Balance strategies whose microbatches do not depend on the number of ranks.

The last bits of a microbatch's loss and gradient depend on which sequences it contains. Therefore, packing depends only
on the sequences and on a cost model that never changes. The microbatches are then assigned to ranks with a cost model
that may change, such as a fitted one. For models that cannot keep packed sequences apart, each microbatch has one
sequence.
"""

import math
from collections.abc import Callable

import numpy as np

from odc_mpi.data.plan.balance import BalanceStrategy, Costs, Lengths, Plan, check_fit, local_sort
from odc_mpi.data.plan.cost import CostModel
from odc_mpi.data.plan.dynamic_packing import SequenceIndices, pack_pool
from odc_mpi.data.plan.partition import argsort_descending, partition, partition_evenly
from odc_mpi.errors import UserError

#: Function that forms microbatches, given the sequence lengths, the maximum number of tokens and a cost model.
Pack = Callable[[Lengths, int, CostModel], tuple[SequenceIndices, ...]]
#: Number of sequences per assumed rank. A minibatch of n sequences is packed as `dynamic` would for n / 4 ranks.
SEQUENCES_PER_RANK = 4


def _pack(lengths: Lengths, max_tokens: int, packing_cost: CostModel) -> tuple[SequenceIndices, ...]:
    check_fit(lengths, max_tokens)
    if not len(lengths):
        return ()
    size = math.ceil(len(lengths) / SEQUENCES_PER_RANK)
    return pack_pool(lengths, packing_cost.sequence(lengths), max_tokens, packing_cost.constant, size)


def rank_independent_packing(name: str, packing_cost: CostModel, pack: Pack = _pack) -> BalanceStrategy:
    """Return a balance strategy whose microbatches are the same for any number of ranks.

    Args:
        name: Name of one of `BALANCE_STRATEGIES`.
        packing_cost: Cost model for packing. The strategy's own argument `cost` affects only the assignment to ranks.
        pack: Function that forms the microbatches, given `packing_cost`. Not used for "local_sort".

    Raises:
        UserError: `name` is "lb_micro", whose microbatches depend on the number of ranks.
    """

    def assign(lengths: Lengths, size: int, max_tokens: int, cost: CostModel) -> Plan:
        microbatches = pack(lengths, max_tokens, packing_cost)
        costs = _costs(microbatches, lengths, cost)
        parts = [sorted(part, key=lambda i: (-costs[i], i)) for part in partition(costs.tolist(), size)]
        return Plan(tuple(tuple(microbatches[i] for i in part) for part in parts))

    def pool(lengths: Lengths, size: int, max_tokens: int, cost: CostModel) -> Plan:
        microbatches = pack(lengths, max_tokens, packing_cost)
        order = argsort_descending(_costs(microbatches, lengths, cost))
        return Plan(((),) * size, tuple(microbatches[i] for i in order))

    # `local_sort` has one sequence in each microbatch, on any number of ranks.
    strategies = {"lb_mini": assign, "dynamic": pool, "local_sort": local_sort}
    if name not in strategies:
        raise UserError(
            f"data.balance: the microbatches of {name} depend on the number of ranks, which run.exact excludes: set it "
            "to lb_mini or dynamic, or run.exact to false"
        )
    return strategies[name]


def one_sequence_per_microbatch(name: str, cost: CostModel) -> BalanceStrategy:
    """Return a variant of the balance strategy `name` that puts one sequence in each microbatch. `cost` is not used."""
    return _assign_evenly if name == "lb_micro" else rank_independent_packing(name, cost, _separate)


def _separate(lengths: Lengths, max_tokens: int, cost: CostModel) -> tuple[SequenceIndices, ...]:
    check_fit(lengths, max_tokens)
    return tuple((i,) for i in range(len(lengths)))


def _assign_evenly(lengths: Lengths, size: int, max_tokens: int, cost: CostModel) -> Plan:
    """Assign the same number of microbatches to all ranks. Each microbatch contains one sequence or is empty."""
    check_fit(lengths, max_tokens)
    costs = cost.sequence(lengths)
    parts = [sorted(part, key=lambda i: (-costs[i], i)) for part in partition_evenly(costs.tolist(), size)]
    count = max(map(len, parts))
    return Plan(tuple((*((i,) for i in part), *((),) * (count - len(part))) for part in parts))


def _costs(microbatches: tuple[SequenceIndices, ...], lengths: Lengths, cost: CostModel) -> Costs:
    each = cost.sequence(lengths).tolist()
    return np.array([cost.constant + math.fsum(each[i] for i in indices) for indices in microbatches])

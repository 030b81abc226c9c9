"""Balances whose microbatches do not depend on the number of ranks: which rank runs one does. Pure planning.

The last bits of a microbatch's loss and gradient depend on the sequences in it: other shapes, other orders of summing.
So here a minibatch is cut by its sequences alone, and whole microbatches are dealt out. They are cut by a cost that
never changes, and dealt out by one that may, such as a fitted one.
"""

import math

import numpy as np

from odc_mpi.data.plan.balance import Balance, Costs, Lengths, Plan, check_fit, local_sort
from odc_mpi.data.plan.cost import Cost
from odc_mpi.data.plan.cut import Microbatch, cut
from odc_mpi.data.plan.partition import by_falling, partition
from odc_mpi.errors import UserError

#: A minibatch is cut as `dynamic` would cut it for one rank per so many sequences, rounded up.
SEQUENCES_PER_RANK = 4


def same_cut(name: str, cutting: Cost) -> Balance:
    """Return the balance of a name, with microbatches that are the same on any number of ranks. Local.

    Args:
        name: One of `data.plan.balance.BALANCES`.
        cutting: Cost by which minibatches are cut.

    Returns:
        A balance; the cost that it is called with deals the microbatches out.

    Raises:
        UserError: Under this balance microbatches depend on the number of ranks.
    """

    def deal_out(lengths: Lengths, size: int, max_tokens: int, cost: Cost) -> Plan:
        microbatches = _cut(lengths, max_tokens, cutting)
        costs = _costs(microbatches, lengths, cost)
        parts = [sorted(part, key=lambda i: (-costs[i], i)) for part in partition(costs.tolist(), size)]
        return Plan(tuple(tuple(microbatches[i] for i in part) for part in parts))

    def pool(lengths: Lengths, size: int, max_tokens: int, cost: Cost) -> Plan:
        microbatches = _cut(lengths, max_tokens, cutting)
        order = by_falling(_costs(microbatches, lengths, cost))
        return Plan(((),) * size, tuple(microbatches[i] for i in order))

    # With one sequence in each microbatch there is nothing to cut.
    balances = {"lb_mini": deal_out, "dynamic": pool, "local_sort": local_sort}
    if name not in balances:
        raise UserError(
            f"data.balance: {name} cuts microbatches for the number of ranks, which run.exact excludes: set it to "
            "lb_mini or dynamic, or run.exact to false"
        )
    return balances[name]


def _cut(lengths: Lengths, max_tokens: int, cutting: Cost) -> tuple[Microbatch, ...]:
    check_fit(lengths, max_tokens)
    if not len(lengths):
        return ()
    size = math.ceil(len(lengths) / SEQUENCES_PER_RANK)
    return cut(lengths, cutting.sequence(lengths), max_tokens, cutting.constant, size)


def _costs(microbatches: tuple[Microbatch, ...], lengths: Lengths, cost: Cost) -> Costs:
    each = cost.sequence(lengths).tolist()
    return np.array([cost.constant + math.fsum(each[i] for i in own) for own in microbatches])

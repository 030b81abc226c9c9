"""Balance strategies with one sequence in each microbatch, for models that cannot keep packed sequences apart.

These microbatches do not depend on the number of ranks, so an exact run can use them. This module does not use MPI.
"""

from odc_mpi.data.plan.balance import BalanceStrategy, Lengths, Plan, check_fit
from odc_mpi.data.plan.cost import CostModel
from odc_mpi.data.plan.dynamic_packing import SequenceIndices
from odc_mpi.data.plan.partition import partition_evenly
from odc_mpi.data.plan.rank_independent_packing import rank_independent_packing


def one_sequence_per_microbatch(name: str, cost: CostModel) -> BalanceStrategy:
    """Return the variant of one of `BALANCE_STRATEGIES` whose microbatches have one sequence each, costliest first."""
    return _assign_evenly if name == "lb_micro" else rank_independent_packing(name, cost, _separate)


def _separate(lengths: Lengths, max_tokens: int, cost: CostModel) -> tuple[SequenceIndices, ...]:
    check_fit(lengths, max_tokens)
    return tuple((i,) for i in range(len(lengths)))


def _assign_evenly(lengths: Lengths, size: int, max_tokens: int, cost: CostModel) -> Plan:
    """Assign equal numbers of microbatches to the ranks. Some may be empty."""
    check_fit(lengths, max_tokens)
    costs = cost.sequence(lengths)
    parts = [sorted(part, key=lambda i: (-costs[i], i)) for part in partition_evenly(costs.tolist(), size)]
    count = max(map(len, parts))
    return Plan(tuple((*((i,) for i in part), *((),) * (count - len(part))) for part in parts))

"""Balance strategies with one sequence in each microbatch, for models that cannot keep packed sequences apart.

These microbatches do not depend on the number of ranks, so an exact run can use them. This module does not use MPI.
"""

from odc_mpi.data.plan.balance import BALANCE_STRATEGIES, BalanceStrategy, Lengths, Plan, check_fit
from odc_mpi.data.plan.cost import CostModel
from odc_mpi.data.plan.partition import argsort_descending, partition, partition_evenly


def one_sequence_per_microbatch(name: str) -> BalanceStrategy:
    """Return the variant of one of `BALANCE_STRATEGIES` whose microbatches have one sequence each, costliest first."""

    def pool(lengths: Lengths, size: int, max_tokens: int, cost: CostModel) -> Plan:
        check_fit(lengths, max_tokens)
        return Plan(((),) * size, tuple((i,) for i in argsort_descending(cost.sequence(lengths))))

    def assign(lengths: Lengths, size: int, max_tokens: int, cost: CostModel) -> Plan:
        check_fit(lengths, max_tokens)
        costs = cost.sequence(lengths) + cost.constant
        parts = (partition_evenly if name == "lb_micro" else partition)(costs.tolist(), size)
        ordered = [tuple((i,) for i in sorted(part, key=lambda i: (-costs[i], i))) for part in parts]
        count = max(map(len, ordered)) if name == "lb_micro" else 0
        return Plan(tuple(microbatches + ((),) * (count - len(microbatches)) for microbatches in ordered))

    return {"dynamic": pool, "local_sort": BALANCE_STRATEGIES["local_sort"]}.get(name, assign)

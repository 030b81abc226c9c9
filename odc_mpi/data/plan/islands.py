"""Planning for islands that train separately: a minibatch is divided among them, and each is planned alone."""

from collections.abc import Callable

from odc_mpi.data.plan.balance import Costs, Lengths, Plan
from odc_mpi.data.plan.dynamic_packing import SequenceIndices
from odc_mpi.data.plan.partition import partition


def plan_islands(
    lengths: Lengths, costs: Costs, num_islands: int, minibatch_number: int, plan_island: Callable[[Lengths], Plan]
) -> Plan:
    """Divide the sequences of a minibatch into parts of about equal cost, one per island, and plan each part.

    `partition` returns the costliest part first, which often contains the longest sequence. Therefore, the parts
    rotate: consecutive minibatches give the first part to consecutive islands.

    Args:
        lengths: Length in tokens of each sequence, int64 [n]. There may be fewer sequences than islands.
        costs: Cost of each sequence, float64 [n].
        minibatch_number: Number of the minibatch, which must be the same on all ranks.
        plan_island: Function that plans some of the sequences, given their lengths, for the ranks of one island. Plans
            with split sequences are not supported.

    Returns:
        The plan of all ranks, in the order of the islands. With one island, it is the plan from `plan_island`.
    """
    if num_islands == 1:
        return plan_island(lengths)
    parts = partition(costs.tolist(), num_islands)
    parts = [parts[(island - minibatch_number) % num_islands] for island in range(num_islands)]
    microbatches: list[tuple[SequenceIndices, ...]] = []
    pool: list[SequenceIndices] = []
    for part in parts:
        plan = plan_island(lengths[part])
        assert not plan.splits, "split sequences on islands"
        microbatches += [_to_minibatch(part, own) for own in plan.microbatches]
        pool += _to_minibatch(part, plan.pool)
    return Plan(tuple(microbatches), tuple(pool), islands=tuple(map(tuple, parts)))


def _to_minibatch(part: list[int], microbatches: tuple[SequenceIndices, ...]) -> tuple[SequenceIndices, ...]:
    """Convert positions in `part` to positions in the minibatch."""
    return tuple(tuple([part[i] for i in indices]) for indices in microbatches)

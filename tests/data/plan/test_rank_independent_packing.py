import numpy as np
import pytest

from odc_mpi.data.plan.cost import CostModel
from odc_mpi.data.plan.rank_independent_packing import rank_independent_packing
from odc_mpi.errors import UserError

FIRST, LATER = CostModel(), CostModel(constant=300.0, linear=1.0, quadratic=0.01)


def minibatch(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(2, 400, size=count)


@pytest.mark.parametrize("name", ["lb_mini", "dynamic", "local_sort"])
@pytest.mark.parametrize("count", [0, 1, 3, 17, 64])
def test_microbatches_depend_on_sequences_alone(name: str, count: int) -> None:
    lengths, seen = minibatch(count), set()
    for size in (1, 2, 3, 4, 8, 16):
        for cost in (FIRST, LATER):
            plan = rank_independent_packing(name, FIRST)(lengths, size, 512, cost)
            assert len(plan.microbatches) == size
            found = [own for rank in plan.microbatches for own in rank] + list(plan.pool)
            assert sorted(i for own in found for i in own) == list(range(count))
            assert all(lengths[list(own)].sum() <= 512 for own in found)
            seen.add(frozenset(found))
    assert len(seen) == 1


def test_they_are_dealt_out_by_the_cost_that_may_change() -> None:
    lengths = minibatch(64)
    plans = [rank_independent_packing("lb_mini", FIRST)(lengths, 4, 512, cost) for cost in (FIRST, LATER)]
    assert plans[0] != plans[1]
    for plan, cost in zip(plans, (FIRST, LATER), strict=True):
        loads = [sum(cost.constant + cost.sequence(lengths[list(own)]).sum() for own in r) for r in plan.microbatches]
        assert max(loads) < 1.1 * min(loads)


def test_a_cut_for_the_number_of_ranks_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"^data.balance: the microbatches of lb_micro .* set it to lb_mini or dynamic, or run.exact"
    ):
        rank_independent_packing("lb_micro", FIRST)

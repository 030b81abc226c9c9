"""Plans of complete microbatches, which depend on the sequences alone, and plans with one sequence per microbatch."""

import numpy as np
import pytest
from length_fixtures import COST, lognormal_lengths

from odc_mpi.data.plan.balance import BALANCE_STRATEGIES, one_sequence_per_microbatch, rank_independent_packing
from odc_mpi.data.plan.cost import CostModel
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


@pytest.mark.parametrize("name", BALANCE_STRATEGIES)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_sequence_is_a_microbatch(name, size):
    for n in (0, 1, 3, 40):
        lengths = lognormal_lengths(np.random.default_rng(n), n)
        plan = one_sequence_per_microbatch(name, COST)(lengths, size, 4096, COST)
        packs = [*(pack for microbatches in plan.microbatches for pack in microbatches if pack), *plan.pool]
        assert sorted(packs) == [(i,) for i in range(n)]
        assert len(plan.microbatches) == size
        assert bool(plan.pool) == (name == "dynamic" and n > 0)
        for microbatches in (*plan.microbatches, plan.pool):
            costs = [float(COST.sequence(lengths[i])) for (i,) in filter(None, microbatches)]
            assert costs == sorted(costs, reverse=True)
        if name == "lb_micro":
            assert len({len(microbatches) for microbatches in plan.microbatches}) == 1


def test_ranks_are_balanced_by_cost():
    plan = one_sequence_per_microbatch("lb_mini", COST)(np.array([8, 1, 4, 3]), 2, 10, COST)
    assert plan.microbatches == (((0,),), ((2,), (3,), (1,)))


def test_a_sequence_that_is_too_long_is_refused():
    with pytest.raises(UserError, match="max_tokens_per_microbatch"):
        one_sequence_per_microbatch("dynamic", COST)(np.array([11]), 2, 10, COST)

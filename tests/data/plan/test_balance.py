import numpy as np
import pytest
from length_fixtures import COST, lognormal_lengths, microbatch_cost

from odc_mpi.data.plan.balance import BALANCE_STRATEGIES, Plan, dynamic, lb_micro, lb_mini, local_sort
from odc_mpi.data.plan.cost import CostModel
from odc_mpi.errors import UserError


@pytest.mark.parametrize("name", BALANCE_STRATEGIES)
@pytest.mark.parametrize("size", range(1, 9))
def test_each_sequence_is_planned_once_and_fits(name: str, size: int) -> None:
    rng = np.random.default_rng(size)
    for n in (0, 1, 2, 3, 7, 16, 61):
        lengths = lognormal_lengths(rng, n)
        plan = BALANCE_STRATEGIES[name](lengths, size, 4096, COST)
        assert len(plan.microbatches) == size
        packs = [*(pack for microbatches in plan.microbatches for pack in microbatches), *plan.pool]
        assert sorted(i for pack in packs for i in pack) == list(range(n))
        assert {type(i) for pack in packs for i in pack} <= {int}
        assert all(lengths[list(pack)].sum() <= 4096 for pack in packs)
        assert name == "lb_micro" or all(packs)


@pytest.mark.parametrize("name", BALANCE_STRATEGIES)
def test_refuses_what_does_not_fit(name: str) -> None:
    with pytest.raises(UserError, match=r"at most 20 tokens, got 21 in sequence 2 .*max_tokens_per_microbatch"):
        BALANCE_STRATEGIES[name](np.array([20, 5, 21, 30]), 2, 20, COST)


def test_local_sort_deals_in_turn_and_sorts_by_length() -> None:
    plan = local_sort(np.array([3, 9, 5, 1, 5, 4, 8]), 2, 10, COST)
    assert plan.microbatches == (((6,), (2,), (4,), (0,)), ((1,), (5,), (3,)))


def test_lb_mini_lets_the_numbers_of_microbatches_differ() -> None:
    lengths = np.array([1000] + [100] * 20)
    plan = lb_mini(lengths, 2, 1000, CostModel(1.0, 0.0012))  # 2200 against 20 times 112
    assert sorted(map(len, plan.microbatches)) == [1, 2]


def test_packing_is_first_fit_decreasing() -> None:
    # Decreasing: 6 | 5 5 | 4 joins the 6, 3 and 2 share a new one: 3 packs; in the given order it takes 4.
    plan = lb_mini(np.array([2, 5, 4, 5, 3, 6]), 1, 10, CostModel())
    assert plan.microbatches == (((1, 3), (5, 2), (4, 0)),)


def shape(plan: Plan) -> list[list[int]]:
    return [list(map(len, microbatches)) for microbatches in plan.microbatches]


@pytest.mark.parametrize("size", range(1, 9))
def test_lb_micro_gives_ranks_equal_numbers(size: int) -> None:
    rng = np.random.default_rng(size)
    for n in (0, 1, 3, 7, 16, 24, 61):
        lengths = lognormal_lengths(rng, n)
        plan = lb_micro(lengths, size, 4096, COST)
        counts = shape(plan)
        assert len({len(own) for own in counts}) == 1
        assert max(map(sum, counts)) - min(map(sum, counts)) <= 1
        for own, packs in zip(counts, plan.microbatches, strict=True):
            # Empty ones stand last, and only where there is nothing to give.
            assert own.count(0) == max(0, len(own) - sum(own))
            costs = [COST.sequence(lengths[list(pack)]).sum() for pack in packs]
            assert costs == sorted(costs, reverse=True)


def test_lb_micro_leaves_nothing_empty_where_costs_say_nothing() -> None:
    plan = lb_micro(np.array([1, 7, 7, 5, 7, 4, 9]), 2, 10, CostModel(0.0))
    assert all(own.count(0) == max(0, len(own) - sum(own)) for own in shape(plan))


def test_lb_micro_takes_as_few_microbatches_as_packing_finds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(1, 60, 24)
        parts = lb_micro(lengths, 3, 100, CostModel()).microbatches
        least = max(-(-sum(lengths[list(pack)].sum() for pack in own) // 100) for own in parts)
        assert least <= len(parts[0]) <= 11 / 9 * least + 6 / 9


def test_lb_micro_is_even_in_each_turn() -> None:
    lengths = np.array([90, 88, 60, 61, 30, 31, 29, 32])
    plan = lb_micro(lengths, 2, 100, CostModel())
    assert len(plan.microbatches[0]) == len(plan.microbatches[1])
    for one, other in zip(*plan.microbatches, strict=True):
        assert abs(lengths[list(one)].sum() - lengths[list(other)].sum()) <= 4


def test_dynamic_leaves_everything_in_the_pool_by_falling_cost() -> None:
    lengths = lognormal_lengths(np.random.default_rng(3), 50)
    for cost in (COST, CostModel(1.0, 1e-3, 500.0), CostModel(1.0, 0.0, 1e6)):
        for size in (1, 2, 3, 8):
            plan = dynamic(lengths, size, 4096, cost)
            assert plan.microbatches == ((),) * size
            work = [microbatch_cost(cost, lengths[list(pack)]) for pack in plan.pool]
            assert work == sorted(work, reverse=True)


def test_dynamic_packs_more_the_more_a_microbatch_costs() -> None:
    lengths = lognormal_lengths(np.random.default_rng(3), 200)
    mean = float(COST.sequence(lengths).mean())
    counts = [len(dynamic(lengths, 8, 1 << 20, CostModel(1.0, 1e-3, mean * part)).pool) for part in (0.0, 0.1, 1.0)]
    assert counts[0] > counts[1] > counts[2]

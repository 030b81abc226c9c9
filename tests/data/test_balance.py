import itertools
import time

import numpy as np
import pytest

from odc_mpi.data.balance import BALANCES, Plan, lb_mini, local_sort, partition
from odc_mpi.data.cost import Cost
from odc_mpi.errors import UserError

COST = Cost(1.0, 1e-3)


def lognormal(rng: np.random.Generator, n: int, max_tokens: int = 4096) -> np.ndarray:
    return np.minimum(rng.lognormal(6.0, 1.0, n).astype(np.int64) + 1, max_tokens)


def rank_costs(plan: Plan, lengths: np.ndarray, cost: Cost) -> list[float]:
    return [
        sum(float(cost.sequence(lengths[list(pack)]).sum()) for pack in microbatches)
        for microbatches in plan.microbatches
    ]


def greedy(costs: list[float], size: int) -> float:
    """The makespan of longest processing time first (Graham 1969)."""
    loads = [0.0] * size
    for cost in sorted(costs, reverse=True):
        loads[loads.index(min(loads))] += cost
    return max(loads)


def best(costs: list[float], size: int) -> float:
    """The least makespan of all assignments."""
    return min(
        max(sum(cost for cost, rank in zip(costs, ranks, strict=True) if rank == r) for r in range(size))
        for ranks in itertools.product(range(size), repeat=len(costs))
    )


def makespan(parts: list[list[int]], costs: list[float]) -> float:
    return max(sum(costs[i] for i in part) for part in parts)


@pytest.mark.parametrize("name", BALANCES)
@pytest.mark.parametrize("size", range(1, 9))
def test_each_sequence_is_planned_once_and_fits(name: str, size: int) -> None:
    rng = np.random.default_rng(size)
    for n in (0, 1, 2, 3, 7, 16, 61):
        lengths = lognormal(rng, n)
        plan = BALANCES[name](lengths, size, 4096, COST)
        assert len(plan.microbatches) == size
        packs = [pack for microbatches in plan.microbatches for pack in microbatches]
        assert sorted(i for pack in packs for i in pack) == list(range(n))
        assert all(0 < lengths[list(pack)].sum() <= 4096 for pack in packs)


@pytest.mark.parametrize("name", BALANCES)
def test_plans_are_made_of_plain_integers_and_repeat(name: str) -> None:
    lengths = np.repeat(np.array([5, 9, 5, 1]), 25)  # many ties
    plan = BALANCES[name](lengths, 3, 20, COST)
    assert plan == BALANCES[name](lengths.copy(), 3, 20, COST)
    assert {type(i) for microbatches in plan.microbatches for pack in microbatches for i in pack} == {int}


@pytest.mark.parametrize("name", BALANCES)
def test_refuses_what_does_not_fit(name: str) -> None:
    with pytest.raises(UserError, match=r"at most 20 tokens, got 21 in sequence 2 .*max_tokens_per_microbatch"):
        BALANCES[name](np.array([20, 5, 21, 30]), 2, 20, COST)


def test_local_sort_deals_in_turn_and_sorts_by_length() -> None:
    plan = local_sort(np.array([3, 9, 5, 1, 5, 4, 8]), 2, 10, COST)
    assert plan.microbatches == (((6,), (2,), (4,), (0,)), ((1,), (5,), (3,)))


def test_lb_mini_packs_each_rank_alone_by_falling_cost() -> None:
    # Halves of 20: {10, 6, 4} and {9, 8, 3}, or the like; packs of at most 10.
    lengths = np.array([10, 9, 8, 6, 4, 3])
    plan = lb_mini(lengths, 2, 10, Cost())
    assert rank_costs(plan, lengths, Cost()) == [20.0, 20.0]
    for microbatches in plan.microbatches:
        costs = [lengths[list(pack)].sum() for pack in microbatches]
        assert costs == sorted(costs, reverse=True)
    assert sorted(len(microbatches) for microbatches in plan.microbatches) in ([2, 2], [2, 3])


def test_lb_mini_lets_the_numbers_of_microbatches_differ() -> None:
    lengths = np.array([1000] + [100] * 20)
    plan = lb_mini(lengths, 2, 1000, Cost(1.0, 0.0012))  # 2200 against 20 times 112
    assert sorted(map(len, plan.microbatches)) == [1, 2]


def test_packing_is_first_fit_decreasing() -> None:
    # Decreasing: 6 | 5 5 | 4 joins the 6, 3 and 2 share a new one: 3 packs; in the given order it takes 4.
    plan = lb_mini(np.array([2, 5, 4, 5, 3, 6]), 1, 10, Cost())
    assert plan.microbatches == (((1, 3), (5, 2), (4, 0)),)


def test_fewer_sequences_than_ranks() -> None:
    plan = lb_mini(np.array([7, 3]), 5, 10, COST)
    assert sorted(plan.microbatches, reverse=True) == [((1,),), ((0,),), (), (), ()]


@pytest.mark.parametrize("size", [2, 3])
def test_differencing_is_close_to_the_best(size: int) -> None:
    rng = np.random.default_rng(size)
    ratios, greedy_ratios = [], []
    for _ in range(60):
        costs = rng.integers(1, 100, rng.integers(1, 8)).astype(float).tolist()
        optimum = best(costs, size)
        ratios.append(makespan(partition(costs, size), costs) / optimum)
        greedy_ratios.append(greedy(costs, size) / optimum)
    # No case is worse: Michiels et al. 2007, "Performance ratios of the Karmarkar-Karp differencing method".
    assert 1.0 <= max(ratios) <= 4 / 3 - 1 / (3 * size) + 1e-9
    assert np.mean(ratios) < 1.01
    assert np.mean(ratios) < np.mean(greedy_ratios)


def test_differencing_joins_as_karmarkar_and_karp_do() -> None:
    # Their two-way example: 8, 7 differ by 1; 6, 5 by 1; 4; 4 - 1 = 3, 3 - 1 = 2: parts of 16 and 14.
    parts = partition([8.0, 7.0, 6.0, 5.0, 4.0], 2)
    assert parts == [[0, 3, 4], [1, 2]] or parts == [[1, 3, 4], [0, 2]]
    assert makespan(parts, [8.0, 7.0, 6.0, 5.0, 4.0]) == 16.0


@pytest.mark.parametrize(("n", "size"), [(32, 8), (64, 8), (256, 64), (1000, 7)])
def test_differencing_beats_greedy_on_average(n: int, size: int) -> None:
    rng = np.random.default_rng(n)
    ours, theirs = [], []
    for _ in range(10):
        costs = COST.sequence(lognormal(rng, n)).tolist()
        ours.append(makespan(partition(costs, size), costs))
        theirs.append(greedy(costs, size))
    assert np.mean(ours) <= np.mean(theirs)


def test_large_minibatches_plan_quickly() -> None:
    lengths = lognormal(np.random.default_rng(0), 10_000)
    for size in (1, 64):
        begin = time.perf_counter()
        plan = lb_mini(lengths, size, 4096, COST)
        # Takes about 0.1 s; the limit is for slow and busy machines, and fails what grows with the square.
        assert time.perf_counter() - begin < 3.0
        costs = rank_costs(plan, lengths, COST)
        assert max(costs) <= 1.0001 * np.mean(costs)

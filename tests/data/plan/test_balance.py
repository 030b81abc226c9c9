import itertools
import time

import numpy as np
import pytest
from length_fixtures import COST, lognormal_lengths, microbatch_cost
from user_errors import refused

from odc_mpi.data.plan.balance import (
    BALANCE_STRATEGIES,
    check_fit,
    dynamic,
    find_strategy,
    lb_micro,
    lb_mini,
    local_sort,
    rank_independent_packing,
)
from odc_mpi.data.plan.cost import CostModel

UNPACKED = find_strategy("lb_mini", COST, exact=False, packs=False)
FIRST, LATER = CostModel(), CostModel(constant=300.0, linear=1.0, quadratic=0.01)


@pytest.mark.parametrize("packs", [True, False, "rows"])
@pytest.mark.parametrize(
    ("name", "exact"),
    [*((name, False) for name in BALANCE_STRATEGIES), ("lb_mini", True), ("dynamic", True), ("local_sort", True)],
)
def test_each_sequence_is_planned_once_and_fits(name, exact, packs):
    rows, rng = packs == "rows", np.random.default_rng(1)
    strategy = find_strategy(name, FIRST, exact=exact, packs=packs is True, rows=rows)
    for n in (0, 1, 2, 3, 7, 16, 61):
        lengths, seen = lognormal_lengths(rng, n), set()
        for size, cost in itertools.product(range(1, 9), (FIRST, LATER)):
            plan = strategy(lengths, size, 4096, cost)
            assert len(plan.microbatches) == size
            assert not any(plan.microbatches) if name == "dynamic" else not plan.pool
            microbatches = [*itertools.chain(*plan.microbatches), *plan.pool]
            assert sorted(itertools.chain(*microbatches)) == list(range(n))
            assert {type(i) for i in itertools.chain(*microbatches)} <= {int}
            sequences = [lengths[list(microbatch)] for microbatch in microbatches if microbatch]
            assert all((each.max() * len(each) if rows else each.sum()) <= 4096 for each in sequences)
            assert not rows or all(each.min() >= 0.75 * each.max() for each in sequences)
            assert all(len(microbatch) <= 1 for microbatch in microbatches) or packs
            assert len(set(map(len, plan.microbatches))) == 1 if name == "lb_micro" else all(microbatches)
            for in_order in (*plan.microbatches, plan.pool):
                costs = [cost.sequence(lengths[list(microbatch)]).sum() for microbatch in in_order]
                assert costs == sorted(costs, reverse=True)
            seen.add(frozenset(microbatches))
        assert not exact or len(seen) == 1, "microbatches depend on the sequences alone"


def test_refuses_what_does_not_fit():
    words = "at most 20 tokens, got 21 in sequence 2 ...data.max_tokens_per_microbatch"
    refused(words, check_fit, np.array([20, 5, 21, 30]), 20)
    refused("3072 tokens, 3 chunks of 1024, got 3073 in sequence 1 (1 of 2", check_fit, np.array([5, 3073]), 1024, 3)


@pytest.mark.parametrize(
    ("strategy", "lengths", "size", "cost", "expected"),
    [
        # Dealt in turn, and sorted by length.
        (local_sort, [3, 9, 5, 1, 5, 4, 8], 2, COST, (((6,), (2,), (4,), (0,)), ((1,), (5,), (3,)))),
        # First fit decreasing: 6 | 5 5 | 4 joins the 6, 3 and 2 share a new one: 3 packs; in the given order, 4.
        (lb_mini, [2, 5, 4, 5, 3, 6], 1, CostModel(), (((1, 3), (5, 2), (4, 0)),)),
        (
            find_strategy("lb_mini", COST, exact=False, packs=False),
            [8, 1, 4, 3],
            2,
            COST,
            (((0,),), ((2,), (3,), (1,))),
        ),
    ],
)
def test_plans_by_hand(strategy, lengths, size, cost, expected):
    assert strategy(np.array(lengths), size, 10, cost).microbatches == expected


def test_lb_mini_lets_the_numbers_of_microbatches_differ():
    lengths = np.array([1000] + [100] * 20)
    plan = lb_mini(lengths, 2, 1000, CostModel(1.0, 0.0012))  # 2200 against 20 times 112
    assert sorted(map(len, plan.microbatches)) == [1, 2]


def shape(plan):
    return [list(map(len, microbatches)) for microbatches in plan.microbatches]


@pytest.mark.parametrize("size", range(1, 9))
def test_lb_micro_gives_ranks_equal_numbers(size):
    rng = np.random.default_rng(size)
    for n in (0, 1, 3, 7, 16, 24, 61):
        lengths = lognormal_lengths(rng, n)
        plan = lb_micro(lengths, size, 4096, COST)
        counts = shape(plan)
        assert max(map(sum, counts)) - min(map(sum, counts)) <= 1
        counts += shape(lb_micro(np.array([1, 7, 7, 5, 7, 4, 9]), 2, 10, CostModel(0.0)))  # costs say nothing
        # None is empty if there is a sequence to give.
        assert all(of_rank.count(0) == max(0, len(of_rank) - sum(of_rank)) for of_rank in counts)


def test_lb_micro_takes_as_few_microbatches_as_packing_finds():
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(1, 60, 24)
        parts = lb_micro(lengths, 3, 100, CostModel()).microbatches
        least = max(-(-sum(lengths[list(pack)].sum() for pack in of_rank) // 100) for of_rank in parts)
        assert least <= len(parts[0]) <= 11 / 9 * least + 6 / 9


def test_lb_micro_is_even_in_each_turn():
    lengths = np.array([90, 88, 60, 61, 30, 31, 29, 32])
    plan = lb_micro(lengths, 2, 100, CostModel())
    assert len(plan.microbatches[0]) == len(plan.microbatches[1])
    for one, other in zip(*plan.microbatches, strict=True):
        assert abs(lengths[list(one)].sum() - lengths[list(other)].sum()) <= 4


def test_dynamic_packs_more_the_more_a_microbatch_costs():
    lengths = lognormal_lengths(np.random.default_rng(3), 200)
    mean = float(COST.sequence(lengths).mean())
    counts = [len(dynamic(lengths, 8, 1 << 20, CostModel(1.0, 1e-3, mean * part)).pool) for part in (0.0, 0.1, 1.0)]
    assert counts[0] > counts[1] > counts[2]


@pytest.mark.parametrize("name", BALANCE_STRATEGIES)
def test_large_minibatches_plan_quickly(name):
    """None takes half a second. The limit is for slow machines, and fails what grows with the square."""
    lengths = lognormal_lengths(np.random.default_rng(0), 30_000)
    begin = time.process_time()
    BALANCE_STRATEGIES[name](lengths, 64, 4096, CostModel(1.0, 1e-3, 100.0))
    assert time.process_time() - begin < 10.0


def test_they_are_dealt_out_by_the_cost_that_may_change():
    lengths = np.random.default_rng(64).integers(2, 400, size=64)
    plans = [rank_independent_packing("lb_mini", FIRST)(lengths, 4, 512, cost) for cost in (FIRST, LATER)]
    assert plans[0] != plans[1]
    for plan, cost in zip(plans, (FIRST, LATER), strict=True):
        loads = [sum(microbatch_cost(cost, lengths[list(each)]) for each in of_rank) for of_rank in plan.microbatches]
        assert max(loads) < 1.1 * min(loads)


def test_a_cut_for_the_number_of_ranks_is_refused():
    words = "data.balance: the microbatches of lb_micro ...lb_mini or dynamic, or run.exact"
    refused(words, rank_independent_packing, "lb_micro", FIRST)


@pytest.mark.parametrize(("exact", "expected"), [(False, [8] * 8), (True, [4] * 16)])
def test_rows_are_divided_among_the_ranks_unless_the_run_is_exact(exact, expected):
    strategy = find_strategy("dynamic", FIRST, exact=exact, packs=False, rows=True)
    plan = strategy(np.random.default_rng(2).integers(97, 103, 64), 2, 4096, FIRST)
    assert list(map(len, plan.pool)) == expected

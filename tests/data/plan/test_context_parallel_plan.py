"""Plans that split the longest sequences, against brute force in small cases, and invariants of every plan."""

import math
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from length_fixtures import microbatch_cost

from odc_mpi.data.plan.balance import dynamic
from odc_mpi.data.plan.context_parallel import even_bounds, split_longest
from odc_mpi.data.plan.cost import CostModel

COST = CostModel(1.0, 1e-3, 100.0)
#: Linear, quadratic, both, and with a cost for the tokens before a chunk.
COSTS = (CostModel(1.0), CostModel(0.0, 1.0), CostModel(3.0, 0.25), CostModel(1.0, 0.5, 7.0, 1.2))


def longtailed(seed, n):
    return np.clip(np.random.default_rng(seed).lognormal(6.5, 1.0, n).astype(np.int64), 1, 8192)


def costliest(bounds, cost):
    return max(cost.chunk(a, b) for a, b in pairwise(bounds))


@pytest.mark.parametrize("cost", COSTS)
def test_bounds_are_the_best_of_all(cost):
    for length, count, max_tokens in product((1, 2, 5, 9, 14), (1, 2, 3, 4), (5, 14)):
        if count * max_tokens < length:
            continue
        inner = (each for k in range(min(count, length)) for each in combinations(range(1, length), k))
        allowed = [b for b in ((0, *i, length) for i in inner) if max(y - x for x, y in pairwise(b)) <= max_tokens]
        found = even_bounds(length, count, max_tokens, cost)
        assert found in allowed
        assert costliest(found, cost) == pytest.approx(min(costliest(b, cost) for b in allowed), rel=1e-12)


def test_chunks_of_a_long_sequence_cost_the_same_and_the_first_is_the_longest():
    bounds = even_bounds(65_536, 7, 65_536, COST)
    costs = [COST.chunk(a, b) for a, b in pairwise(bounds)]
    tokens = [b - a for a, b in pairwise(bounds)]
    assert len(costs) == 7 and max(costs) < 1.002 * min(costs)
    assert tokens == sorted(tokens, reverse=True)
    # Without a cost of splitting, the costs of chunks sum to that of the sequence.
    fair = CostModel(1.0, 1e-3, 0.0, 1.0)
    assert math.fsum(fair.chunk(a, b) for a, b in pairwise(bounds)) == pytest.approx(fair.sequence(65_536).item())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 16])
def test_each_token_is_planned_once_and_chunks_fit(size):
    for n in (0, 1, 2, 3, 7, 24, 61):
        for max_tokens in (8192, -(-8192 // size)):
            lengths = longtailed(size * 100 + n, n)
            plan = split_longest(lengths, size, max_tokens, COST)
            assert plan.microbatches == ((),) * size and all(plan.pool)
            assert sorted([*(i for pack in plan.pool for i in pack), *(s.position for s in plan.splits)]) == list(
                range(n)
            )
            assert all(lengths[list(pack)].sum() <= max_tokens for pack in plan.pool)
            for split in plan.splits:
                assert split.bounds[0] == 0 and split.bounds[-1] == lengths[split.position] and len(split.ranks) > 1
                assert all(0 < b - a <= max_tokens for a, b in pairwise(split.bounds))
                assert len(set(split.ranks)) == len(split.ranks) and set(split.ranks) <= set(range(size))
            assert plan == split_longest(lengths.copy(), size, max_tokens, COST)
            assert {type(x) for s in plan.splits for x in (s.position, *s.bounds, *s.ranks)} <= {int}


def run(plan, size, lengths, cost):
    """Run a plan event by event: a chunk begins when all ranks of its sequence have reached it. Fails on a deadlock."""
    due = [[split for split in plan.splits if rank in split.ranks] for rank in range(size)]
    free = [0.0] * size
    while any(due):
        split = next(
            queue[0] for queue in due if queue and all(due[r] and due[r][0] is queue[0] for r in queue[0].ranks)
        )
        began = max(free[r] for r in split.ranks)
        for r in split.ranks:
            due[r].pop(0)
            free[r] = began + cost.constant + costliest(split.bounds, cost)
    for pack in plan.pool:
        free[free.index(min(free))] += microbatch_cost(cost, lengths[list(pack)])
    return max(free)


@pytest.mark.parametrize(("per_rank", "gain"), [(1, 1.6), (2, 1.35), (4, 1.1)])
def test_gain_of_splitting_over_drawing_unsplit_sequences(per_rank, gain):
    whole = split_s = 0.0
    for seed in range(10):
        lengths = longtailed(seed, 8 * per_rank)
        whole += run(dynamic(lengths, 8, 8192, COST), 8, lengths, COST)
        split_s += run(split_longest(lengths, 8, 8192, COST), 8, lengths, COST)
    assert whole / split_s > gain


def test_one_sequence_is_shared_by_all_ranks():
    (split,) = split_longest(np.array([8192]), 5, 8192, COST).splits
    assert split.ranks == tuple(range(5))


def test_nothing_is_cut_for_nothing():
    for lengths, size in ((np.full(24, 500), 8), (longtailed(0, 400), 4), (longtailed(1, 9), 1)):
        assert split_longest(lengths, size, 8192, COST) == dynamic(lengths, size, 8192, COST)
    dear = CostModel(1.0, 1e-3, 0.0, 2.5)  # two pieces for the price of two and a half sequences
    assert not split_longest(np.array([4000, 10]), 2, 8192, dear).splits


def test_more_long_sequences_than_ranks_take_turns():
    lengths = np.array([3000] * 7)
    plan = split_longest(lengths, 3, 1024, COST)
    assert [len(split.ranks) for split in plan.splits] == [3] * 7
    assert run(plan, 3, lengths, COST) > 0

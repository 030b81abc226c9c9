"""Splitting of a minibatch for dynamic balance: against single sequences, against a fixed plan, and in time."""

import numpy as np
import pytest
from length_fixtures import lognormal_lengths, microbatch_cost

from odc_mpi.data.plan.balance import lb_mini
from odc_mpi.data.plan.cost import CostModel
from odc_mpi.data.plan.dynamic_packing import makespan, pack_pool


def compute_work(microbatches, lengths, cost):
    return [microbatch_cost(cost, lengths[list(pack)]) for pack in microbatches]


def test_makespan_is_that_of_ranks_that_draw():
    assert makespan([3.0, 3.0, 2.0, 2.0, 2.0], 2) == 7.0  # not the 6 of a plan
    assert makespan([4.0, 4.0], 2, spread=0.5) == 6.0
    assert makespan([1.0, 1.0, 1.0], 2, spread=0.5) == 1.5  # the fast one draws two
    assert makespan([], 3) == 0.0
    assert makespan([5.0, 1.0], 1, spread=0.5) == 6.0


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_makespan_is_bitwise_that_of_item_by_item(spread):
    rng = np.random.default_rng(0)
    for size in (2, 3, 17, 100):
        for work in (rng.exponential(1.0, 400), -np.sort(-rng.exponential(1.0, 400)), rng.integers(0, 4, 90) * 1.0):
            free = [0.0] * size
            for cost in work.tolist():
                rank = free.index(min(free))
                free[rank] += cost * (1 + spread * (2 * rank / (size - 1) - 1))
            assert makespan(work, size, spread) == max(free)


@pytest.mark.parametrize(("size", "spread", "most"), [(2, 0.0, 1.1), (8, 0.0, 1.1), (8, 0.3, 0.9)])
def test_a_constant_is_paid_seldom_and_equal_ranks_still_end_together(size, spread, most):
    """Relative to a fixed plan, which knows everything but speeds; single sequences take longer."""
    cost, slowness = CostModel(1.0, 1e-4, 200.0), np.linspace(1 - spread, 1 + spread, size)
    ends = {"dynamic": 0.0, "lb_mini": 0.0, "single": 0.0}
    for seed in range(20):
        lengths = lognormal_lengths(np.random.default_rng(seed), 8 * size)
        costs = cost.sequence(lengths)
        packed = compute_work(pack_pool(lengths, costs, 4096, 200.0, size), lengths, cost)
        ends["dynamic"] += makespan(packed, size, spread)
        fixed = [sum(compute_work(local, lengths, cost)) for local in lb_mini(lengths, size, 4096, cost).microbatches]
        ends["lb_mini"] += (slowness * fixed).max()
        ends["single"] += makespan(sorted(costs + 200.0, reverse=True), size, spread)
    assert ends["dynamic"] < most * ends["lb_mini"]
    assert ends["dynamic"] < (1.0 if spread else 0.9) * ends["single"]

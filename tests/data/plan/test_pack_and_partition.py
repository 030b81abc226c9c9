"""Number partitioning, packing and splitting against brute force, known bounds and fixed plans; costs."""

import itertools
import tracemalloc

import numpy as np
import pytest
from length_fixtures import COST, lognormal_lengths, microbatch_cost

from odc_mpi.data.plan.balance import lb_mini
from odc_mpi.data.plan.cost import CostModel, flops_cost
from odc_mpi.data.plan.dynamic_packing import makespan, pack_pool
from odc_mpi.data.plan.partition import _halving, argsort_descending, even_fit, partition, partition_evenly


def best(costs, size, most=None):
    """Return the least largest of all assignments with at most `most` items per rank."""
    return min(
        max(sum(cost for cost, rank in zip(costs, ranks, strict=True) if rank == r) for r in range(size))
        for ranks in itertools.product(range(size), repeat=len(costs))
        if most is None or max(map(ranks.count, range(size))) <= most
    )


def largest(parts, costs):
    return max(sum(costs[i] for i in part) for part in parts)


@pytest.mark.parametrize("size", [2, 3])
def test_differencing_is_close_to_the_best(size):
    rng = np.random.default_rng(size)
    ratios, even_ratios = [], []
    for _ in range(60):
        costs = rng.integers(1, 100, rng.integers(1, 8)).astype(float).tolist()
        ratios.append(largest(partition(costs, size), costs) / best(costs, size))
        even_ratios.append(largest(partition_evenly(costs, size), costs) / best(costs, size, -(-len(costs) // size)))
    # No case is worse: Michiels et al. 2007, "Performance ratios of the Karmarkar-Karp differencing method".
    assert 1.0 <= max(ratios) <= 4 / 3 - 1 / (3 * size) + 1e-9
    assert np.mean(ratios) < 1.01
    # 2 - 1 / ceil(n / size) at worst: Michiels et al., "Computer-assisted proof of performance ratios for the
    # differencing method" (2012), for the balanced form.
    assert 1.0 - 1e-9 <= max(even_ratios) <= 2 - 1 / 4
    assert np.mean(even_ratios) < 1.05


def test_differencing_joins_as_karmarkar_and_karp_do():
    # Their two-way example: 8, 7 differ by 1; 6, 5 by 1; 4; 4 - 1 = 3, 3 - 1 = 2: parts of 16 and 14.
    parts = partition([8.0, 7.0, 6.0, 5.0, 4.0], 2)
    assert parts == [[0, 3, 4], [1, 2]] or parts == [[1, 3, 4], [0, 2]]
    assert largest(parts, [8.0, 7.0, 6.0, 5.0, 4.0]) == 16.0


def test_even_parts_of_many_are_even():
    costs = COST.sequence(lognormal_lengths(np.random.default_rng(0), 256)).tolist()
    parts = partition_evenly(costs, 8)
    assert largest(parts, costs) <= 1.001 * sum(costs) / 8


@pytest.mark.parametrize("integers", [True, False])
def test_the_exchange_is_the_best_of_all_pairs(integers):
    rng = np.random.default_rng(integers)
    for _ in range(300):
        num_high, num_low = rng.integers(1, 12, 2)
        values = rng.integers(0, 9, 24) if integers else rng.lognormal(0.0, 1.0, 24)
        high, low = values[:num_high].astype(float), values[12 : 12 + num_low].astype(float)
        gap = float(rng.integers(0, 12))
        misses = np.abs(high[:, None] - low[None, :] - gap / 2)
        assert _halving(high, low, gap) == divmod(int(misses.argmin()), len(low))


def test_even_parts_need_no_memory_with_the_square():
    costs = COST.sequence(lognormal_lengths(np.random.default_rng(0), 10_000)).tolist()
    for size in (1, 2):
        tracemalloc.start()
        parts = partition_evenly(costs, size)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 40e6  # a table of all pairs of two ranks has 200 MB
        assert largest(parts, costs) <= 1.0001 * sum(costs) / size


def test_even_fit_takes_the_older_of_equally_cheap_bins():
    rng = np.random.default_rng(0)
    for most in (0.0, 9.0, 20.0, 1e9):
        sizes = rng.integers(1, 10, 200)
        bins = []
        for i in argsort_descending(sizes):
            cheapest = min(bins, key=lambda indices: sizes[indices].sum(), default=[])
            if cheapest and sizes[cheapest].sum() + sizes[i] <= min(most, 40):
                cheapest.append(i)
            else:
                bins.append([i])
        assert even_fit(sizes, sizes * 1.0, 40, most) == bins


def test_falling_order_keeps_equal_ones_in_place():
    assert argsort_descending(np.array([1, 3, 1, 3, 2])) == [1, 3, 4, 0, 2]


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


def test_sequence_is_a_polynomial_of_the_length():
    cost = CostModel(linear=2.0, quadratic=0.5).sequence(np.array([0, 1, 4, 2**20], dtype=np.int32))
    assert cost.tolist() == [0.0, 2.5, 16.0, 2.0**21 + 2.0**39]


def test_flops_count_the_multiplications_of_a_layer():
    """Count 2 FLOPs per multiply-add of every product, pair by pair, in a layer with 4 h² parameters."""
    length, hidden = 64, 8
    matrices = 2 * length * 4 * hidden * hidden
    pairs = sum(i + 1 for i in range(length))  # causal: token i sees itself and those before
    attention = 2 * 2 * pairs * hidden  # scores, and values
    cost = flops_cost(num_parameters=4 * hidden * hidden, num_layers=1, hidden_size=hidden)
    # The formula takes s² / 2 pairs for s (s + 1) / 2.
    assert cost.sequence([length])[0] == pytest.approx(3 * (matrices + attention), rel=1 / length)

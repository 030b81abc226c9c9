"""Number partitioning and packing against brute force and known bounds."""

import itertools
import tracemalloc

import numpy as np
import pytest
from length_fixtures import COST, lognormal_lengths

from odc_mpi.data.plan.partition import _halving, argsort_descending, even_fit, partition, partition_evenly


def best(costs, size, most=None):
    """Return the least makespan of all assignments with at most `most` items per rank."""
    return min(
        max(sum(cost for cost, rank in zip(costs, ranks, strict=True) if rank == r) for r in range(size))
        for ranks in itertools.product(range(size), repeat=len(costs))
        if most is None or max(map(ranks.count, range(size))) <= most
    )


def makespan(parts, costs):
    return max(sum(costs[i] for i in part) for part in parts)


@pytest.mark.parametrize("size", [2, 3])
def test_differencing_is_close_to_the_best(size):
    rng = np.random.default_rng(size)
    ratios, even_ratios = [], []
    for _ in range(60):
        costs = rng.integers(1, 100, rng.integers(1, 8)).astype(float).tolist()
        ratios.append(makespan(partition(costs, size), costs) / best(costs, size))
        even_ratios.append(makespan(partition_evenly(costs, size), costs) / best(costs, size, -(-len(costs) // size)))
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
    assert makespan(parts, [8.0, 7.0, 6.0, 5.0, 4.0]) == 16.0


def test_even_parts_of_many_are_even():
    costs = COST.sequence(lognormal_lengths(np.random.default_rng(0), 256)).tolist()
    parts = partition_evenly(costs, 8)
    assert makespan(parts, costs) <= 1.001 * sum(costs) / 8


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
        assert makespan(parts, costs) <= 1.0001 * sum(costs) / size


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

"""Minibatches that are divided among islands, which train apart."""

from itertools import islice

import numpy as np
import pytest
from length_fixtures import COST, lognormal_lengths
from pair_files import write_pairs

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.loader import Loader
from odc_mpi.data.plan.balance import BALANCE_STRATEGIES, find_strategy, plan_islands
from odc_mpi.data.plan.cost import CostModel

#: Cost models under which minibatches are divided differently.
LINEAR, QUADRATIC = CostModel(), CostModel(quadratic=1.0)


@pytest.fixture
def dataset(write_dataset):
    lengths = np.minimum(lognormal_lengths(np.random.default_rng(1), 53), 4096) // 16 + 2
    with Dataset(write_dataset(lengths.tolist())) as opened:
        yield opened


def island_loader(dataset, **arguments):
    return Loader(dataset, **{"minibatch_sequences": 8, "max_tokens_per_microbatch": 300, **arguments})


def island_costs(minibatch, cost):
    lengths = minibatch.dataset.lengths[minibatch.indices]
    return [float(cost.sequence(lengths[list(part)]).sum()) for part in minibatch.plan.islands]


def shares(dataset, size, **arguments):
    return [next(island_loader(dataset, rank=rank, size=size, **arguments)).island_share for rank in range(size)]


@pytest.mark.parametrize("name", BALANCE_STRATEGIES)
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("num_islands", [1, 2, 4])
def test_ranks_of_an_island_have_the_plan_for_its_sequences(name, packs, num_islands, num_ranks):
    strategy = find_strategy(name, COST, exact=False, packs=packs)

    def plan_island(lengths):
        return strategy(lengths, num_ranks, 4096, COST)

    for n in (1, 2, 7, 40):
        lengths = lognormal_lengths(np.random.default_rng(n), n)
        plan = plan_islands(lengths, COST.sequence(lengths), num_islands, n, plan_island)
        assert len(plan.microbatches) == num_islands * num_ranks
        if num_islands == 1:
            assert plan == plan_island(lengths) and not plan.islands
            continue
        assert sorted(i for part in plan.islands for i in part) == list(range(n))
        assert sorted(set().union(*map(plan.pool_of, range(len(plan.microbatches))))) == sorted(plan.pool)
        for rank, microbatches in enumerate(plan.microbatches):
            part = plan.islands[rank // num_ranks]
            alone = plan_island(lengths[list(part)])
            for found, expected in (
                (microbatches, alone.microbatches[rank % num_ranks]),
                (plan.pool_of(rank), alone.pool),
            ):
                assert found == tuple(tuple(part[i] for i in indices) for indices in expected)


def test_costs_of_islands_are_nearly_equal_under_the_current_cost(dataset):
    loader = island_loader(dataset, minibatch_sequences=53, size=3, num_islands=3)
    for loader.cost in (LINEAR, QUADRATIC):
        costs = island_costs(next(loader), loader.cost)
        assert len(costs) == 3 and max(costs) < 1.02 * min(costs)


def test_the_costliest_part_rotates_over_epochs_and_after_resuming(dataset):
    settings = {"size": 3, "num_islands": 3, "cost": QUADRATIC}
    loader = island_loader(dataset, **settings)
    found = []
    for number in range(17):  # 7 in each data epoch
        state, minibatch = loader.state_dict(), next(loader)
        costs = island_costs(minibatch, QUADRATIC)
        assert costs[number % 3] == max(costs) > min(costs)
        found.append((state, minibatch.plan))
    for first in (5, 9):
        resumed = island_loader(dataset, **settings)
        resumed.load_state_dict(found[first][0])
        assert [minibatch.plan for minibatch in islice(resumed, 8)] == [plan for _, plan in found[first : first + 8]]


@pytest.mark.parametrize("balance", ["lb_mini", "dynamic"])
def test_exact_islands_depend_neither_on_their_ranks_nor_on_a_later_cost(dataset, balance):
    seen = set()
    for num_ranks in (1, 2, 4):
        for later in (LINEAR, QUADRATIC):
            settings = {"balance": balance, "exact": True, "minibatch_sequences": 20}
            loader = island_loader(dataset, size=2 * num_ranks, num_islands=2, cost=LINEAR, **settings)
            loader.cost = later
            plan = next(loader).plan
            both = plan.microbatches[:num_ranks], plan.microbatches[num_ranks:]
            pools = plan.pool_of(0), plan.pool_of(num_ranks)
            seen.add(tuple(frozenset([*sum(of_ranks, ()), *pool]) for of_ranks, pool in zip(both, pools, strict=True)))
    assert len(seen) == 1


def test_shares_are_those_of_loss_tokens(dataset):
    assert shares(dataset, 2) == [1.0, 1.0]
    minibatch = next(island_loader(dataset, size=2))
    assert minibatch.island_amounts == (minibatch.num_tokens,)
    minibatches = [next(island_loader(dataset, rank=rank, size=6, num_islands=3)) for rank in range(6)]
    num_tokens = [sum(microbatch.num_tokens for microbatch in minibatch) for minibatch in minibatches]
    amounts = [num_tokens[0] + num_tokens[1], num_tokens[2] + num_tokens[3], num_tokens[4] + num_tokens[5]]
    for rank, minibatch in enumerate(minibatches):
        assert list(minibatch.island_amounts) == amounts
        assert minibatch.island_share == amounts[rank // 2] / minibatch.num_tokens


@pytest.mark.parametrize("balance", BALANCE_STRATEGIES)
def test_islands_without_a_sequence_have_no_share(dataset, balance):
    settings = {"minibatch_sequences": 2, "num_islands": 4, "balance": balance}
    found = shares(dataset, 8, **settings)
    assert found[::2] == found[1::2] and found.count(0.0) == 4 and sum(found) == pytest.approx(2.0)
    for rank, share in enumerate(found):
        minibatch = next(island_loader(dataset, rank=rank, size=8, **settings))
        assert len(list(minibatch.microbatches(range))) <= (share > 0)


def test_shares_of_pairs_are_those_of_their_number(tmp_path):
    write_pairs(tmp_path / "pairs.h5", [(2, 20, 20), (2, 3, 3), (2, 3, 3), (2, 3, 3)])
    with Dataset(tmp_path / "pairs.h5") as pairs:
        settings = {"minibatch_sequences": 4, "num_islands": 2}
        minibatch = next(island_loader(pairs, size=2, **settings))
        assert minibatch.island_amounts == (1, 3)
        assert shares(pairs, 2, **settings) == [0.25, 0.75]

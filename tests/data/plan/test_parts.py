"""Minibatches of which islands that train apart work on a part each."""

from itertools import islice

import numpy as np
import pytest
from length_fixtures import lognormal_lengths

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.loader import WHOLE, Loader, Part
from odc_mpi.data.plan.balance import BALANCE_STRATEGIES
from odc_mpi.data.plan.cost import CostModel

#: Cost models under which minibatches are divided differently.
LINEAR, QUADRATIC = CostModel(), CostModel(quadratic=1.0)


@pytest.fixture
def dataset(write_dataset):
    lengths = np.minimum(lognormal_lengths(np.random.default_rng(1), 53), 4096) // 16 + 2
    with Dataset(write_dataset(lengths.tolist())) as opened:
        yield opened


def loaders(dataset, count, **arguments):
    settings = {"minibatch_sequences": 8, "max_tokens_per_microbatch": 300, **arguments}
    return [Loader(dataset, **settings, part=Part(index, count)) for index in range(count)]


def costs(minibatches, cost):
    return [float(cost.sequence(each.dataset.lengths[each.indices]).sum()) for each in minibatches]


@pytest.mark.parametrize("balance", BALANCE_STRATEGIES)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_parts_of_a_minibatch_are_all_of_it(dataset, balance, count):
    [whole] = loaders(dataset, 1, balance=balance, size=2)
    parts = loaders(dataset, count, balance=balance, size=2)
    for minibatch, *of_parts in islice(zip(whole, *parts, strict=True), 20):
        assert sorted(np.concatenate([part.indices for part in of_parts])) == sorted(minibatch.indices)
        assert {(part.data_epoch, part.position) for part in of_parts} == {(minibatch.data_epoch, minibatch.position)}
        for part in of_parts:
            planned = [*part.plan.microbatches[0], *part.plan.microbatches[1], *part.plan.pool]
            assert sorted(sum(planned, ())) == list(range(len(part.indices)))
    assert [part.num_epochs(3) for part in parts] == [whole.num_epochs(3)] * count


@pytest.mark.parametrize("cost", [LINEAR, QUADRATIC], ids=["linear", "quadratic"])
def test_parts_cost_nearly_the_same_and_do_not_depend_on_a_fitted_cost(dataset, cost):
    """Each island fits a cost of its own; with it, islands would divide the same minibatch differently."""
    parts = loaders(dataset, 3, minibatch_sequences=53, cost=cost)
    for part in parts[1:]:
        part.cost = CostModel(quadratic=5.0)
    minibatches = [next(part) for part in parts]
    found = costs(minibatches, cost)
    assert max(found) < 1.02 * min(found)
    assert sorted(np.concatenate([each.indices for each in minibatches])) == list(range(53))


def test_the_costliest_part_rotates_over_epochs_and_after_resuming(dataset):
    parts, found = loaders(dataset, 3, cost=QUADRATIC), []
    for number in range(17):  # 7 in each data epoch
        state, minibatches = parts[0].state_dict(), [next(part) for part in parts]
        found.append((state, [each.indices.tolist() for each in minibatches]))
        of_parts = costs(minibatches, QUADRATIC)
        assert of_parts[number % 3] == max(of_parts) > min(of_parts)
    for first in (5, 9):
        resumed = loaders(dataset, 3, cost=QUADRATIC)
        for part in resumed:
            part.load_state_dict(found[first][0])
        for _, wanted in found[first : first + 8]:
            assert [next(part).indices.tolist() for part in resumed] == wanted


@pytest.mark.parametrize("balance", ["lb_mini", "dynamic"])
def test_exact_parts_depend_neither_on_their_ranks_nor_on_a_later_cost(dataset, balance):
    seen = set()
    for size in (1, 2, 4):
        for later in (LINEAR, QUADRATIC):
            settings = {"balance": balance, "exact": True, "minibatch_sequences": 20, "size": size, "cost": LINEAR}
            part = loaders(dataset, 2, **settings)[1]
            part.cost = later
            plan = next(part).plan
            seen.add(frozenset([*sum(plan.microbatches, ()), *plan.pool]))
    assert len(seen) == 1


def test_parts_share_sequences_if_there_are_too_few(dataset):
    """So each island has a gradient in every step."""
    minibatches = [next(part) for part in loaders(dataset, 4, minibatch_sequences=2)]
    assert [len(each.indices) for each in minibatches] == [1, 1, 1, 1]
    assert len({each.indices[0] for each in minibatches}) == 2
    assert loaders(dataset, 1)[0]._part == WHOLE

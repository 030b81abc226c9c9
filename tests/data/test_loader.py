from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from user_errors import refused

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.loader import Loader
from odc_mpi.data.microbatch import IGNORED_LABEL, read_chunk, read_microbatch
from odc_mpi.data.plan.balance import BALANCE_STRATEGIES
from odc_mpi.data.plan.cost import CostModel

LENGTHS = np.minimum(np.random.default_rng(1).lognormal(3.0, 0.8, 53).astype(int) + 2, 200).tolist()
LONGEST = max(LENGTHS)


@pytest.fixture
def dataset(write_dataset):
    with Dataset(write_dataset(LENGTHS)) as opened:
        yield opened


def loader(dataset, **arguments):
    return Loader(dataset, **{"minibatch_sequences": 8, "max_tokens_per_microbatch": 200, **arguments})


def minibatch_key(minibatch):
    """Return the fields that do not depend on the rank."""
    counts = minibatch.num_tokens, minibatch.num_input_tokens
    return minibatch.data_epoch, minibatch.position, minibatch.indices.tolist(), *counts


@pytest.mark.parametrize("balance", BALANCE_STRATEGIES)
@pytest.mark.parametrize("size", range(1, 9))
def test_ranks_share_each_minibatch_exactly_once(dataset, size, balance):
    rng = np.random.default_rng(size)
    settings = {"minibatch_sequences": int(rng.integers(1, 20)), "balance": balance, "cost": CostModel(1, 0.01)}
    loaders = [loader(dataset, rank=rank, size=size, seed=size, **settings) for rank in range(size)]
    for minibatches in islice(zip(*loaders, strict=True), 8):
        first = minibatches[0]
        # Tickets go to one rank after the other, as if all were equally fast.
        batches = [
            list(mine.microbatches(lambda count, mine=mine: range(mine.rank, count, size))) for mine in minibatches
        ]
        assert all(minibatch_key(minibatch) == minibatch_key(first) for minibatch in minibatches)
        assert all(minibatch.plan == first.plan for minibatch in minibatches)
        if not first.plan.pool:
            assert [len(list(filter(None, of_rank))) for of_rank in first.plan.microbatches] == list(map(len, batches))
        everything = [batch for mine in batches for batch in mine]
        assert sorted(i for batch in everything for i in batch.indices) == sorted(first.indices)
        assert sum(batch.num_tokens for batch in everything) == first.num_tokens
        assert sum(batch.num_input_tokens for batch in everything) == first.num_input_tokens
        assert all(batch.num_input_tokens <= 200 for batch in everything)


def test_positions_are_drawn_when_they_are_due(dataset):
    minibatch = next(loader(dataset, balance="dynamic", minibatch_sequences=20, rank=1, size=2))
    assert minibatch.plan.microbatches == ((), ())
    refused("batches", iter, minibatch)
    pool, claimed = minibatch.plan.pool, []

    def draw(count):
        assert count == len(pool)
        for position in (1, 3, count - 1):
            claimed.append(position)
            yield position

    for number, batch in enumerate(minibatch.microbatches(draw), start=1):
        assert claimed == [1, 3, len(pool) - 1][:number]
        assert batch.indices.tolist() == minibatch.indices[list(pool[claimed[-1]])].tolist()
    assert len(claimed) == 3
    # Nothing is drawn without a pool.
    minibatch = next(loader(dataset, balance="lb_mini"))
    assert [b.indices.tolist() for b in minibatch.microbatches(draw)] == [b.indices.tolist() for b in minibatch]
    assert len(claimed) == 3


def test_a_data_epoch_is_everything_once_and_shuffled(dataset):
    minibatches = list(islice(loader(dataset), 14))  # 53 sequences: 6 of 8, one of 5
    assert [m.data_epoch for m in minibatches] == [0] * 7 + [1] * 7
    assert [m.position for m in minibatches] == [0, 8, 16, 24, 32, 40, 48] * 2
    assert [len(m.indices) for m in minibatches] == ([8] * 6 + [5]) * 2
    first, second = (np.concatenate([m.indices for m in minibatches[a : a + 7]]).tolist() for a in (0, 7))
    assert sorted(first) == sorted(second) == list(range(53))
    assert first != sorted(first) and first != second


def test_the_order_depends_on_the_seed_alone(dataset):
    def order(**arguments):
        return [int(i) for m in islice(loader(dataset, **arguments), 10) for i in m.indices]

    assert order() == order(size=4, rank=3, balance="local_sort")
    assert order() != order(seed=1)
    # With minibatches larger than the data set, each is a data epoch.
    assert order(minibatch_sequences=1000)[: 2 * 53] == order(minibatch_sequences=53)[: 2 * 53]


@pytest.mark.parametrize("steps", [0, 3, 6, 7, 10])
def test_resumes_with_the_same_continuation(dataset, steps):
    uninterrupted = loader(dataset, seed=5)
    list(islice(uninterrupted, steps))
    state = uninterrupted.state_dict()
    assert state == {"data_epoch": steps // 7, "position": steps % 7 * 8}
    resumed = loader(dataset, seed=5, size=3, rank=1)  # also on another number of ranks
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    continuation = [minibatch_key(m) for m in islice(uninterrupted, 9)]
    assert continuation == [minibatch_key(m) for m in islice(resumed, 9)]
    assert (continuation[0][0], continuation[0][1]) == (state["data_epoch"], state["position"])
    assert resumed.state_dict() == uninterrupted.state_dict()


@pytest.mark.parametrize("sizes", [[8], [8, 3], [3, 20], [53, 7], [7, 60, 4], [10, 1]], ids=str)
@pytest.mark.parametrize("num_epochs", [0.5, 1, 2, 2.25])
def test_epochs_are_counted_in_sequences_whatever_the_sizes_of_minibatches(dataset, sizes, num_epochs):
    """A run is resumed after every two minibatches with another size, and in the end not interrupted."""
    state, seen = {"data_epoch": 0, "position": 0}, []
    for number, size in enumerate(sizes * 2):
        draw = loader(dataset, minibatch_sequences=size)
        draw.load_state_dict(state)
        num_steps = draw.num_steps_to(num_epochs)
        foreseen = [draw.num_epochs(step) for step in range(num_steps + 1)]
        assert foreseen[0] == pytest.approx(len(seen) / 53)
        is_last = number == 2 * len(sizes) - 1
        for step, minibatch in enumerate(islice(draw, num_steps if is_last else min(2, num_steps)), 1):
            seen += minibatch.indices.tolist()
            assert draw.num_epochs() == foreseen[step] == pytest.approx(len(seen) / 53)
        state = draw.state_dict()
    needed = round(num_epochs * 53)
    assert needed <= len(seen) < needed + max(sizes) and draw.num_steps_to(num_epochs) == 0
    for epoch in range(int(num_epochs)):
        assert sorted(seen[53 * epoch : 53 * (epoch + 1)]) == list(range(53))


@pytest.mark.parametrize(("data_epoch", "position"), [(0, 53), (0, -1), (-1, 0)])
def test_refuses_the_state_of_another_data_set(dataset, data_epoch, position):
    state = {"data_epoch": data_epoch, "position": position}
    refused("position from 0 to 52 ... set data.path", loader(dataset).load_state_dict, state)


def test_reads_only_what_is_due(dataset, monkeypatch):
    read = []
    whole = Dataset.__getitem__
    monkeypatch.setattr(Dataset, "__getitem__", lambda self, i: read.append(int(i)) or whole(self, i))
    minibatch = next(loader(dataset, size=2, rank=1))
    assert read == []
    batches = iter(minibatch)
    first = next(batches)
    assert read == first.indices.tolist()
    rest = [i for batch in batches for i in batch.indices]
    assert read == [*first.indices, *rest]
    assert len(read) < len(minibatch.indices)


def test_batches_hold_the_sequences_unpadded(dataset):
    for batch in islice((batch for minibatch in loader(dataset) for batch in minibatch), 30):
        inputs = batch.inputs
        length = batch.num_input_tokens
        for name in ("input_ids", "labels", "position_ids"):
            assert inputs[name].dtype == torch.int64 and inputs[name].shape == (1, length)
        assert inputs["cu_seq_lens_q"].dtype == inputs["cu_seq_lens_k"].dtype == torch.int32
        assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist()
        lengths = dataset.lengths[batch.indices]
        assert inputs["cu_seq_lens_q"].tolist() == [0, *np.cumsum(lengths)]
        assert inputs["max_length_q"] == inputs["max_length_k"] == lengths.max()
        assert type(inputs["max_length_q"]) is int and type(batch.num_tokens) is int and type(length) is int
        for i, (a, b) in zip(batch.indices, pairwise(inputs["cu_seq_lens_q"].tolist()), strict=True):
            tokens, mask = dataset[i]
            assert inputs["input_ids"][0, a:b].tolist() == tokens.tolist()
            assert inputs["position_ids"][0, a:b].tolist() == list(range(len(tokens)))
            mask[0] = False
            assert inputs["labels"][0, a:b].tolist() == np.where(mask, tokens, -100).tolist()
        assert batch.num_tokens == (inputs["labels"] != -100).sum()
        assert batch.num_tokens == dataset.num_trained_tokens[batch.indices].sum()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"minibatch_sequences": 0}, "expected data.minibatch_sequences of at least 1, got 0"),
        ({"max_tokens_per_microbatch": 0}, "expected data.max_tokens_per_microbatch of at least 1, got 0"),
        ({"seed": -1}, "expected run.seed of at least 0, got -1"),
        ({"balance": "lb-mini"}, "got 'lb-mini' (did you mean lb_mini?)"),
        ({"balance": "zzz"}, "expected data.balance among local_sort, lb_micro, lb_mini, dynamic, got 'zzz'"),
        (
            {"max_tokens_per_microbatch": LONGEST - 1},
            f"got {LONGEST} in sequence {LENGTHS.index(LONGEST)} ",
        ),
        ({"context_parallel": True, "size": 2, "max_tokens_per_microbatch": 20}, "of at most 40 tokens, 2 chunks of"),
    ],
)
def test_user_errors_are_reported_at_once(dataset, arguments, expected):
    refused(expected, loader, dataset, **arguments)


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (0, 0)])
def test_ranks_are_those_of_a_world(dataset, rank, size):
    with pytest.raises(AssertionError):
        loader(dataset, rank=rank, size=size)


@pytest.mark.parametrize("bounds", [(0, 7, 12), (0, 1, 11, 12), (0, 12)])
def test_chunks_have_the_tokens_positions_and_labels_of_the_sequence(dataset, bounds):
    index = int(np.flatnonzero(dataset.lengths >= 12)[0])
    length = int(dataset.lengths[index])
    bounds = (*bounds[:-1], length)
    chunks = [read_chunk(dataset, index, *ends) for ends in pairwise(bounds)]
    whole = read_microbatch(dataset, np.array([index]))
    for name in ("input_ids", "position_ids"):
        assert torch.equal(torch.cat([chunk.inputs[name] for chunk in chunks], 1), whole.inputs[name])
    positions = [chunk.logit_positions + begin for chunk, begin in zip(chunks, bounds[:-1], strict=True)]
    assert torch.equal(torch.cat(positions), whole.logit_positions)
    assert torch.equal(torch.cat([chunk.targets for chunk in chunks]), whole.targets)
    labels = torch.nn.functional.pad(whole.inputs["labels"][0, 1:], (0, 1), value=IGNORED_LABEL)
    assert torch.equal(labels[whole.logit_positions], whole.targets)
    assert len(whole.targets) == int((labels != IGNORED_LABEL).sum()) == whole.num_tokens
    assert sum(chunk.num_tokens for chunk in chunks) == whole.num_tokens
    assert sum(chunk.num_input_tokens for chunk in chunks) == length
    for chunk in chunks:
        assert chunk.is_chunk and chunk.indices.tolist() == [index]
        assert chunk.inputs["cu_seq_lens_q"].tolist() == [0, chunk.num_input_tokens]

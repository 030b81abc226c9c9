"""Context parallel training gives the losses and parameters of a plain loop over unsplit sequences."""

import functools
import time

import pytest
from late_device import LateDevice
from small_training import assert_close, configure, expected, training

from odc_mpi import api
from odc_mpi.data import loader
from odc_mpi.data.plan.balance import Plan, SequenceSplit, dynamic
from odc_mpi.data.plan.context_parallel import even_bounds
from odc_mpi.training import run as training_run
from odc_mpi.training import source
from odc_mpi.training.inputs import open_inputs

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]


def split_longest(count, lengths, size, max_tokens, cost):
    """Split the two longest sequences of a minibatch over overlapping ranks; the others are drawn."""
    count = min(count, size)
    if count == 1:
        return dynamic(lengths, size, max_tokens, cost)
    longest = sorted(range(len(lengths)), key=lambda i: -lengths[i])[:2]
    splits = []
    for turn, i in enumerate(longest):
        bounds = even_bounds(int(lengths[i]), count, max_tokens, cost)
        ranks = [(turn + k) % size for k in range(len(bounds) - 1)]
        splits.append(SequenceSplit(i, bounds, tuple(ranks if turn else reversed(ranks))))
    rest = [i for i in range(len(lengths)) if i not in longest]
    plan = dynamic(lengths[rest], size, max_tokens, cost)
    return Plan(plan.microbatches, tuple(tuple(rest[k] for k in indices) for indices in plan.pool), tuple(splits))


def train(config, world):
    """Losses and parameters, and the number of split sequences."""
    inputs = open_inputs(config, world.rank, world.size)
    with training(config, world, inputs) as (trainer, steps):
        lines, state = steps(), trainer.model.state_dict()
    num_split = sum(line.get("num_cut_sequences", 0) for line in lines)
    return inputs, [line["loss"] for line in lines], state, num_split


def configured(dataset_path, **changes):
    return configure(dataset_path, **{"data.balance": "dynamic", "data.context_parallel": "auto", **changes})


def check(config, world, min_split, like=None):
    inputs, losses, state, num_split = train(config, world)
    wanted, parameters = expected(like or config, inputs.dataset)
    assert num_split >= (min_split if world.size > 1 else 0)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert_close(state, parameters)


def test_as_unsplit_sequences_on_one_process(dataset_path, world, monkeypatch):
    monkeypatch.setattr(loader, "split_longest", functools.partial(split_longest, 2))
    check(configured(dataset_path), world, 10)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("changes", [{}, {"comm.zero_copy": "off", "model.gradient_checkpointing": "true"}])
def test_chunks_on_a_device(dataset_path, world, monkeypatch, changes):
    """Host memory stands in for the device; its copies are late."""
    device = LateDevice()
    for module in (api, training_run):
        monkeypatch.setattr(module, "find_device", lambda kind, host_rank: device)
    monkeypatch.setattr(loader, "split_longest", functools.partial(split_longest, 3))
    config = configured(dataset_path, **{"run.device": "cuda", "comm.window_device": "cpu"} | changes)
    check(config, world, 10, like=configured(dataset_path, **changes))
    assert device.copies and not device.unfinished


@pytest.mark.sizes(3, 4)
@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (3, {"comm.prefetch": 0}),
        (4, {"comm.prefetch": 2, "comm.zero_copy": "off"}),
        (3, {"model.gradient_checkpointing": "true"}),
        (2, {"model.gradient_checkpointing": "true", "comm.zero_copy": "off", "comm.reduction": "mailbox"}),
        (3, {"comm.reduction": "mailbox", "comm.mailbox_bytes": 4096}),
    ],
)
def test_over_several_ranks_as_unsplit_sequences_on_one_process(dataset_path, world, monkeypatch, count, changes):
    monkeypatch.setattr(loader, "split_longest", functools.partial(split_longest, count))
    check(configured(dataset_path, **changes), world, 10)


@pytest.mark.sizes(3)
@pytest.mark.parametrize(
    ("rel", "changes"),
    [
        # Sums over chunks round to bf16 in other places: 4e-3 of each number, less of a loss.
        (5e-3, {"model.param_dtype": "bfloat16"}),
        # If only queries have adapters, no gradients of keys and values are sent.
        (1e-5, {"lora.r": 4, "lora.target_modules": "[q_proj]", "optim.learning_rate": 0.1}),
        (1e-5, {"lora.r": 4, "lora.target_modules": "[k_proj, v_proj]", "optim.learning_rate": 0.1}),
    ],
    ids=["bf16", "queries", "keys and values"],
)
def test_losses_with_and_without_splits(dataset_path, world, monkeypatch, rel, changes):
    changes = changes | {"run.steps": 3}
    _, whole, _, _ = train(configured(dataset_path, **changes, **{"data.context_parallel": "off"}), world)
    monkeypatch.setattr(loader, "split_longest", functools.partial(split_longest, 3))
    _, split, _, num_split = train(configured(dataset_path, **changes), world)
    assert num_split and split == pytest.approx(whole, rel=rel)


def test_the_plan_cuts_where_it_gains(dataset_path, world):
    """Two sequences a minibatch: the longer one is split over the ranks, or takes all the time."""
    check(configured(dataset_path, **{"data.minibatch_sequences": 2, "data.cost": "linear"}), world, 3)


def test_sequences_longer_than_a_microbatch(dataset_path, world):
    """Sequences of up to 40 tokens, in chunks of at most 20."""
    check(configured(dataset_path, **{"data.max_tokens_per_microbatch": 20}), world, 1, like=configured(dataset_path))


@pytest.mark.sizes(3)
def test_a_slow_rank_and_a_learned_cost(dataset_path, world, monkeypatch):
    monkeypatch.setattr(loader, "split_longest", functools.partial(split_longest, 3))
    if world.rank == 1:
        attend = source.context_parallel_attention
        monkeypatch.setattr(source, "context_parallel_attention", lambda *args: time.sleep(0.01) or attend(*args))
    check(configured(dataset_path, **{"data.cost": "fitted"}), world, 10)


@pytest.mark.sizes(3)
def test_a_model_without_context_parallelism_is_trained_unsplit(dataset_path, world):
    window = {"model.config.use_sliding_window": "true", "model.config.sliding_window": 8}
    config = configured(dataset_path, **window, **{"model.config.max_window_layers": 1, "run.steps": 1})
    inputs, _, _, num_split = train(config, world)
    assert num_split == 0
    assert "a window of 8 tokens" in inputs.context_parallel

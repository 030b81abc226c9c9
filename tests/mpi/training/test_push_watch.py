"""Gradients with a flipped bit, and the rank, host and unit that a run names for them."""

import copy
import random

import pytest
import torch
from small_training import configure

from odc_mpi.observe import push_watch
from odc_mpi.observe.push_watch import PushWatch
from odc_mpi.shard.gradients import GradientPusher
from odc_mpi.training.context import RunContext
from odc_mpi.training.inputs import open_inputs
from odc_mpi.training.run import build_trainer, decide

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]

UNIT = "model.layers.1"
WARM = 12


class Flips:
    """Flips one bit of an element in the first gradient of a unit that this rank pushes after `arm`."""

    def __init__(self, patch):
        self._push, self._armed = GradientPusher.push, None
        flips = self
        patch.setattr(GradientPusher, "push", lambda pusher, *arguments: flips.push(pusher, *arguments))

    def arm(self, unit, position, bit):
        self._armed = (unit, position, bit)

    def push(self, pusher, unit, names, gradients, *others):
        if self._armed and self._armed[0] == unit.name:
            _, position, bit = self._armed
            self._armed = None
            gradients = [each if each is None else each.clone() for each in gradients]
            flat = max((each for each in gradients if each is not None), key=torch.numel).view(-1)
            element = int(position * flat.numel())
            flat[element : element + 1].view(torch.int32).bitwise_xor_(1 << bit)
        self._push(pusher, unit, names, gradients, *others)


@pytest.fixture
def flips():
    with pytest.MonkeyPatch.context() as patch:
        yield Flips(patch)


@pytest.fixture
def warnings(monkeypatch):
    lines = []
    monkeypatch.setattr(push_watch, "warn", lines.append)
    return lines


def start(world, dataset_path, **changes):
    config = configure(dataset_path, **{"run.steps": 1000, "optim.warmup_steps": 0, **changes})
    inputs = open_inputs(config, world.rank, world.size)
    trainer = build_trainer(RunContext(config, world, inputs=inputs, decision=decide(config, world)))
    watch = PushWatch(world, trainer.model, config.run.norm_watch)
    trainer.callbacks.append(watch)
    return trainer, watch


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"run.exact": True},
        {"comm.gradient_cache_bytes": 0},
        {"comm.reduction": "mailbox"},
        {"lora.r": 2},
    ],
    ids=str,
)
def test_an_element_with_a_flipped_exponent_bit_names_its_rank_host_and_unit(
    world, dataset_path, flips, warnings, monkeypatch, changes
):
    trainer, watch = start(world, dataset_path, **changes)
    if "comm.gradient_cache_bytes" not in changes:  # all are pushed at the end: no microbatch is known to be the last
        trainer.model.cache_bytes = trainer.model.cache_needs.maximum
        monkeypatch.setattr(trainer._source, "num_microbatches", lambda _: None)
    for _ in range(WARM):
        assert trainer.step()["push_deviation"] < 100
    culprit = world.size - 1
    if world.rank == culprit:
        flips.arm(UNIT, 0.5, 30)
    assert trainer.step()["push_deviation"] > 1e5
    for _ in range(3):
        assert trainer.step()["push_deviation"] < 100
    assert watch.on_train_end() == {"push_warnings": 1}
    expected = f"WARNING: step {WARM + 1}: rank {culprit} on {world.hosts[culprit]} pushed a gradient of unit {UNIT} "
    assert [line[: len(expected)] for line in warnings] == ([expected] if world.rank == 0 else [])
    trainer.model.close()


class Rewind:
    """Returns a training to a state that it had."""

    def __init__(self, trainer, watch):
        self._trainer, self._watch = trainer, watch
        self._values = [each.detach().clone() for each in trainer.model.shard_parameters()]
        self._optimizer = copy.deepcopy(trainer.update.optimizer.state_dict())
        self._state = copy.deepcopy((trainer.completed_steps, trainer.state_dict(), watch._usual))

    def __call__(self):
        trainer = self._trainer
        trainer.model.overwrite_parameters(self._values)
        trainer.update.optimizer.load_state_dict(copy.deepcopy(self._optimizer))
        trainer.completed_steps, state, self._watch._usual = copy.deepcopy(self._state)
        trainer.load_state_dict(state)


@pytest.mark.slow
@pytest.mark.sizes(2)
def test_random_flips_that_change_the_loss_are_reported(world, dataset_path, flips, warnings):
    """A hundred draws of rank, unit, element and bit of the exponent."""
    trainer, watch = start(world, dataset_path, **{"optim.adam_epsilon": 1e-8})
    for _ in range(60):  # the loss falls from 4.2 to 2
        trainer.step()
    rewind, draw = Rewind(trainer, watch), random.Random(1)

    def losses():
        rewind()
        return [trainer.step()["loss"] for _ in range(4)]

    undisturbed, harmful, reported = losses(), 0, 0
    units = [unit.name for unit in trainer.model.units]
    for _ in range(100):
        rank, unit = draw.randrange(world.size), draw.choice(units)
        flip = unit, draw.random(), draw.randrange(23, 31)
        if world.rank == rank:
            flips.arm(*flip)
        before = watch._num_warnings
        disturbed = losses()
        if any(not abs(a - b) <= 0.01 * b for a, b in zip(disturbed, undisturbed, strict=True)):
            harmful += 1
            reported += watch._num_warnings > before
    assert harmful > 3 and reported >= 0.95 * harmful
    trainer.model.close()

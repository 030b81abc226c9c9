"""Islands that train separately: contributions that are left out, when they merge, and loops of their own."""

import itertools
import math
from contextlib import contextmanager

import pytest
import torch
from small_training import configure, training_apart

from odc_mpi import DiLoCo, Islands, shard_model
from odc_mpi.errors import TrainingError, UserError
from odc_mpi.islands.outer_optimizer import OuterOptimizer

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]

OUTER = {"islands.mode": "outer", "islands.by": 1, "islands.sync_every": 3, "model.config.num_hidden_layers": 1}


@pytest.fixture
def spoil(world, monkeypatch):
    """Return a function that replaces the differences that island 1 sends in some rounds, counted from 1."""

    def replace(rounds, change):
        encode, calls = OuterOptimizer.encode, itertools.count(1)

        def spoiled(self, index):
            if next(calls) in rounds and world.rank == 1:
                outer = self.outer
                self.outer = [o + change * (o - inner) for o, inner in zip(outer, self._slices, strict=True)]
                message = encode(self, index)
                self.outer = outer
                return message
            return encode(self, index)

        monkeypatch.setattr(OuterOptimizer, "encode", spoiled)

    return replace


WATCHED = OUTER | {"islands.sync_every": 1, "run.steps": 14}


@pytest.mark.parametrize(("first", "change", "text"), [(12, 99.0, "times the usual norm"), (2, math.nan, "not finite")])
def test_a_difference_out_of_the_usual_range_is_left_out_and_its_island_named(
    world, dataset_path, spoil, capfd, first, change, text
):
    """The others go on as if the island had trained on nothing, and it goes on from their outer parameters."""
    config = configure(dataset_path, **WATCHED)
    spoil({first, first + 1}, change)
    with training_apart(config, world) as (trainer, _):
        left_out = [trainer.step()["contributions_left_out"] for _ in range(config.run.steps)]
        state = trainer.model.state_dict()
    assert left_out == [int(step in (first, first + 1)) for step in range(1, 15)]
    assert all(value.isfinite().all() for value in state.values())
    errors = capfd.readouterr().err
    assert errors.count("on island 1") == errors.count(text) == (2 if world.rank == 0 else 0), errors


def test_an_island_that_is_left_out_keeps_none_of_its_parameters(world, dataset_path, monkeypatch):
    """Its parameters, not only what it sent, are wrong; a share of them would be as wrong."""
    config = configure(dataset_path, **WATCHED | {"islands.local_share": 0.5, "run.steps": 3})
    with training_apart(config, world) as (trainer, _):
        trainer.step()
        optimizer_step = trainer.update.optimizer.step

        def broken():
            optimizer_step()
            if world.rank == 1:
                for each in trainer.model.shard_parameters():
                    each.data[:1] = math.nan

        monkeypatch.setattr(trainer.update.optimizer, "step", broken)
        assert trainer.step()["contributions_left_out"] == 1
        monkeypatch.undo()
        metrics = trainer.step()
        assert metrics["contributions_left_out"] == 0 and not metrics["skipped"]


def test_outer_parameters_that_differ_between_islands_end_the_run(world, dataset_path):
    config = configure(dataset_path, **WATCHED)
    with training_apart(config, world) as (trainer, loop):
        trainer.step()
        if world.rank == 1:
            outer = loop._optimizer.outer
            next(each for each in outer if each.numel())[0] += 1e-3
        with pytest.raises(TrainingError, match="the outer parameters of islands 0 and 1 differ"):
            trainer.step()
        trainer.model.publish()


def test_islands_that_send_a_part_of_their_differences_train_nearly_as_well(world, dataset_path):
    """All islands have the same outer parameters, which each merge checks."""
    last = {}
    for wire, feedback in (("float32", False), ("topk", True)):
        changes = {"islands.wire": wire, "islands.error_feedback": feedback, "run.steps": 45}
        with training_apart(configure(dataset_path, **OUTER | changes), world) as (trainer, _):
            steps = [trainer.step() for _ in range(45)]
            last[wire] = (
                sum(step["loss"] for step in steps[-5:]) / 5,
                sum(step["bytes_between_islands"] for step in steps),
            )
    assert steps[0]["loss"] - last["topk"][0] > 0.5 * (steps[0]["loss"] - last["float32"][0]) > 0.3
    assert last["float32"][1] / last["topk"][1] > 60


def test_islands_synchronize_when_the_gradient_norm_changes(world, dataset_path):
    """After each of the first 25 steps, at the latest 10 steps later, and at a peak of one island's norm."""
    changes = {"islands.sync_when": "change", "islands.change": 0.5, "islands.sync_every": 10, "run.steps": 60}
    config = configure(dataset_path, **OUTER | changes)
    with training_apart(config, world) as (trainer, _):
        found = []
        for number in range(1, 61):
            if number == 40 and world.rank == 1:
                trainer.objective.loss = lambda *a, loss=trainer.objective.loss: 100 * loss(*a)
            metrics = trainer.step()
            trainer.objective.__dict__.pop("loss", None)
            if "outer_norm" in metrics:
                assert metrics["contributions_left_out"] == 0, number
                found.append(number)
    assert found[:26] == [*range(1, 26), 35]
    if world.rank == 1:
        assert found[26] == 40
    else:  # joins at the end of the step in which it sees the request, at the latest where it would merge
        assert 36 <= found[26] <= 45


@contextmanager
def linear_islands(world, by):
    """Islands with a layer of zeros, and its optimizer."""
    islands, module = Islands(world, by), torch.nn.Linear(8, 3, bias=False)
    torch.nn.init.zeros_(module.weight)
    model = shard_model(module, islands.island, units=[])
    yield islands, model, torch.optim.SGD(model.shard_parameters(), lr=1.0)
    model.close()
    islands.close()


@pytest.mark.sizes(2, 4)
def test_merges_in_a_loop_of_its_own(world):
    """Two islands move a parameter to different values; both continue from their mean, weighted by tokens."""
    with linear_islands(world, world.size // 2) as (islands, model, optimizer):
        loop = DiLoCo(islands, model, sync_every=2, learning_rate=1.0, momentum=0.0)
        for step in (1, 2):
            with model.minibatch():
                if islands.island.rank == 0:
                    (-(1 + 2 * islands.index) * model(torch.eye(8)).sum()).backward()
            optimizer.step()
            result = loop.step([3, 1][islands.index])
            model.publish()
            wanted = 2 * (0.75 * 1 + 0.25 * 3) if step == 2 else 1 + 2 * islands.index
            assert torch.equal(model.state_dict()["weight"], torch.full((3, 8), float(wanted)))
            assert (result is None) == (step == 1)
            world.gather_objects(None)
        loop.free()
        with pytest.raises(UserError, match="islands: expected two or more, got 1"):
            DiLoCo(Islands(world, world.size), model)


@pytest.mark.sizes(2, 3, 4)
def test_islands_take_steps_at_their_own_speeds_and_in_different_numbers(world):
    """An island that has finished takes part in the merges of the others, and all end with the same parameters."""
    with linear_islands(world, 1) as (islands, model, optimizer):
        loop = DiLoCo(islands, model, sync_every=6, fragments=3, delay=1)
        num_steps = 2 + 5 * world.rank
        for step in range(1, num_steps + 1):
            with model.minibatch():
                model(torch.eye(8)).sum().backward()
            optimizer.step()
            loop.step(1)
            if step == num_steps:
                loop.finish()
            model.publish()
        found = world.gather_objects((model.state_dict()["weight"].sum().item(), loop.num_merges))
        assert len(set(found)) == 1 and found[0][0] < 0
        loop.free()

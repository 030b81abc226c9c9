"""The order of callbacks; an objective whose normalizer is known late, and a callback that runs the model."""

import re

import pytest
import torch
from small_training import assert_close, configure, expected, training

from odc_mpi.data.microbatch import read_microbatch
from odc_mpi.observe.callback import Callback
from odc_mpi.training import run
from odc_mpi.training.inputs import open_inputs
from odc_mpi.training.loop import Objective

pytestmark = pytest.mark.mpi


class DividedAtA(Objective):
    """The mean over the trained tokens, of which each rank counts its own, by the loss of the model itself."""

    gathered_names = ("loss", "tokens")

    def __init__(self, module):
        pass

    def on_step_begin(self, step):
        self._loss = self._tokens = 0

    def loss(self, model, minibatch, microbatch):
        return model(**microbatch.inputs).loss * microbatch.num_tokens

    def on_microbatch_end(self, result):
        self._loss += result.loss
        self._tokens += result.microbatch.num_tokens

    def local_values(self):
        return (self._loss, self._tokens)

    def on_gathered(self, step, gathered):
        self.loss_normalizer = gathered.sum("tokens")
        step.metrics |= {"loss": gathered.sum("loss") / self.loss_normalizer, "num_tokens": int(self.loss_normalizer)}


class Evaluation(Callback):
    """A forward on every rank between two steps, each rank as often as it likes."""

    def __init__(self, model, dataset, rank):
        self._model, self._rank = model, rank
        self._batch = read_microbatch(dataset, torch.tensor([0, 1]).numpy())
        self.losses = []

    @torch.no_grad()
    def on_step_end(self, step):
        self._model.eval()
        for _ in range(1 + self._rank % 2):
            loss = self._model(**self._batch.to(self._model.device).inputs).loss.item()
        self._model.train()
        self.losses.append(loss)


def test_a_loss_normalizer_that_is_gathered(world, dataset_path, monkeypatch):
    monkeypatch.setattr(run, "SFTObjective", DividedAtA)
    config = configure(dataset_path, **{"data.balance": "dynamic"})
    inputs = open_inputs(config, world.rank, world.size)
    losses, parameters = expected(config, inputs.dataset)
    with training(config, world, inputs) as (trainer, steps):
        assert [m["loss"] for m in steps()] == pytest.approx(losses, rel=1e-5)
        assert_close(trainer.model.state_dict(), parameters)


def test_forwards_between_steps_change_nothing(world, dataset_path):
    config = configure(dataset_path)
    inputs = open_inputs(config, world.rank, world.size)
    losses, _ = expected(config, inputs.dataset)
    with training(config, world, inputs) as (trainer, steps):
        evaluation = Evaluation(trainer.model, inputs.dataset, world.rank)
        trainer.callbacks.append(evaluation)
        assert [m["loss"] for m in steps()] == pytest.approx(losses, rel=1e-5)
        assert len(set(evaluation.losses)) == config.run.steps and evaluation.losses[-1] < evaluation.losses[0]
        assert len({tuple(gathered) for gathered in world.gather_objects(evaluation.losses)}) == 1


@pytest.mark.sizes(1)
def test_callbacks_run_in_the_documented_order(world, dataset_path, shared_dir, monkeypatch):
    table = run.__doc__.partition("in this order:\n\n")[2]
    documented = [name for line in table.splitlines() for name in re.findall(r"[A-Z]\w+", line.strip().split("  ")[0])]
    found = []

    def look(trainer, *rest):
        for each in trainer.callbacks:
            found.append(next(kind.__name__ for kind in type(each).mro() if kind.__name__ in documented))
        run_steps(trainer, *rest)

    run_steps = run._run_steps
    monkeypatch.setattr(run, "_run_steps", look)
    changes = {"run.exact": "true", "data.cost": "fitted", "data.eval_path": dataset_path, "run.steps": 1}
    run.train(configure(dataset_path, **changes, **{"run.dir": shared_dir / "ordered"}), world)
    assert found == documented


@pytest.mark.sizes(1)
def test_two_callbacks_with_the_same_name_are_refused(world, dataset_path):
    """Of two numbers of one name only the last would be heard."""
    config = configure(dataset_path)
    inputs = open_inputs(config, world.rank, world.size)
    with training(config, world, inputs) as (trainer, _):
        for _ in range(2):
            trainer.callbacks.append(Named())
        with pytest.raises(ValueError, match="got 'heard' of Named and Named"):
            trainer.start()
        trainer.callbacks.pop()
        trainer.start()


class Named(Callback):
    gathered_names = ("heard",)

    def local_values(self):
        return (1.0,)

"""A step whose gradient is not finite changes nothing, is counted, and is forgotten once one was."""

import json

import pytest
import torch
from small_training import configure

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.errors import TrainingError
from odc_mpi.observe.callback import Step
from odc_mpi.training import run
from odc_mpi.training.context import RunContext
from odc_mpi.training.inputs import open_inputs
from odc_mpi.training.nonfinite import NonFiniteReport
from odc_mpi.training.run import build_trainer, decide
from odc_mpi.training.train import train

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]


def spoil(trainer, world, steps):
    """Let the loss of these steps, counted from 1, be NaN on the last rank."""

    def spoilt(*arguments):
        is_here = trainer.completed_steps + 1 in steps and world.rank == world.size - 1
        return loss(*arguments) * (torch.nan if is_here else 1.0)

    loss, trainer.objective.loss = trainer.objective.loss, spoilt


def values(trainer):
    """All that a step changes, on this rank."""
    states = [value for state in trainer.update.optimizer.state.values() for value in state.values()]
    return [tensor.clone() for tensor in (*(tensor for _, tensor in trainer.model.slices()), *states)]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("max_norm", [0.5, 0.0])
def test_a_skipped_step_changes_nothing_and_the_run_recovers(world, dataset_path, max_norm):
    changes = {"optim.max_grad_norm": max_norm, "run.max_skipped_steps": 2, "run.steps": 8}
    config = configure(dataset_path, **changes)
    trainer = build_trainer(
        RunContext(config, world, inputs=open_inputs(config, world.rank, world.size), decision=decide(config, world))
    )
    trainer.callbacks.append(NonFiniteReport(config.run, world, trainer.model, trainer.objective))
    spoil(trainer, world, {2, 4, 5})
    for step, skipped in enumerate((False, True, False, True), 1):
        before = values(trainer)
        assert trainer.step()["skipped"] is skipped, step  # never two in a row so far
        after = values(trainer)
        assert same(before, after) is skipped or not any(t.numel() for t in after)
        assert all(tensor.isfinite().all() for tensor in after)
    with pytest.raises(TrainingError, match=r"in 2 steps in a row, which is run\.max_skipped_steps"):
        trainer.step()
    resumed = NonFiniteReport(config.run, world, trainer.model, trainer.objective, trainer.state_dict())
    resumed.on_step_end(Step(6, None, {"skipped": False}))
    resumed = NonFiniteReport(config.run, world, trainer.model, trainer.objective, trainer.state_dict())
    with pytest.raises(TrainingError, match="in 3 steps in a row"):
        resumed.on_step_end(Step(6, None, {"skipped": True}))
    trainer.model.close()


POSITION = 20


def spoil_layer(trainer, in_backward):
    """Let the output of layer 1 at `POSITION` of each sequence that has it, or its gradient, be NaN."""
    module, seen = trainer.model.module, {}

    def hook(layer, args, output):
        if in_backward:
            output.register_hook(lambda gradient: gradient * torch.nan)
            return output
        return output.masked_fill((seen["positions"] == POSITION)[..., None], torch.nan)

    module.register_forward_pre_hook(
        lambda _, args, inputs: seen.update(positions=inputs["position_ids"]), with_kwargs=True
    )
    module.get_submodule("model.layers.1").register_forward_hook(hook)


@pytest.mark.sizes(2)
@pytest.mark.parametrize("in_backward", [False, True])
def test_the_origin_is_reported(world, shared_dir, dataset_path, monkeypatch, capfd, in_backward):
    def spoilt(*arguments):
        trainer = build_trainer(*arguments)
        spoil_layer(trainer, in_backward)
        return trainer

    monkeypatch.setattr(run, "build_trainer", spoilt)
    run_dir = shared_dir / f"origin{in_backward}"
    changes = {"run.dir": run_dir, "run.detect_anomaly": "true"}
    where = (
        r"backward of unit model\.layers\.1, in one of sequences \d+, "
        if in_backward
        else r"output of unit model\.layers\.1, sequence \d+ of"
    )
    with pytest.raises(TrainingError, match=rf"step 1: the gradient is not finite, first found on rank \d: {where}"):
        train(configure(dataset_path, **changes), world)
    world.gather_objects(None)
    found = json.loads((run_dir / "anomaly.json").read_text())
    assert (found["step"], found["unit"]) == (1, "model.layers.1") and len(found["inputs"][0]["input_ids"]) == 1
    if not in_backward:
        (index,) = found["sequences"]
        with Dataset(dataset_path) as dataset:
            assert dataset.lengths[index] > POSITION
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 1
    monkeypatch.setattr(run, "build_trainer", build_trainer)
    train(configure(dataset_path, **{"run.dir": run_dir}), world)
    world.gather_objects(None)
    assert not (run_dir / "anomaly.json").exists() and "WARNING: step" not in capfd.readouterr().err

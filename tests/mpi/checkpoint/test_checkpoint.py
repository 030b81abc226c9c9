"""A run that is interrupted and resumed is the run that was not; what does not fit together is refused."""

import json
import os
import signal
import time
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from damage import flip
from pretended_nodes import on_nodes_of_three
from small_training import configure
from whole_runs import SETTINGS, STEPS, lines, losses

from odc_mpi.api import shard_model
from odc_mpi.checkpoint import saver
from odc_mpi.checkpoint.commands import verify
from odc_mpi.checkpoint.manifest import read_manifest, shard_name, step_name, steps_in, write_manifest
from odc_mpi.checkpoint.state import TrainingState
from odc_mpi.comm.settings import CommConfig
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.plan.fitted import FittedCostModel
from odc_mpi.errors import AllRanksUserError, StoppedError, TrainingError
from odc_mpi.training.rundir import checkpointing
from odc_mpi.training.source import FitCostModel
from odc_mpi.training.stop import StopRequest
from odc_mpi.training.train import train

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize(("dtype", "balance"), [("float32", "lb_mini"), ("bfloat16", "dynamic")])
def test_interrupted_and_resumed(world, run, dtype, balance):
    settings = {"model__param_dtype": dtype, "data__balance": balance}
    settings["data__cost"] = "fitted"
    if world.size == 1:
        settings["data__cost"] = "flops"  # what is fitted depends on times
    uninterrupted = run("uninterrupted", **settings)
    run("interrupted", run__steps=2, run__checkpoint_every=2, **settings)
    assert len(run("interrupted", run__steps=4, run__checkpoint_every=3, **settings)) == 4
    interrupted = run("interrupted", run__checkpoint_every=100, **settings)
    if world.size == 1:
        assert interrupted == uninterrupted
    else:
        np.testing.assert_allclose(interrupted, uninterrupted, rtol=1e-5 if dtype == "float32" else 2e-2)
    assert list(steps_in(run.base / "interrupted" / "checkpoints")) == [2, 3, 4, 6]
    summary = json.loads((run.base / "interrupted" / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert [summary["loss_first"], summary["loss_last"]] == [interrupted[0], interrupted[-1]]
    assert summary["collectives_per_minibatch"] == 3, "agreeing on checkpoints takes none"
    assert summary["checkpoints_saved"] == 1 and summary["checkpoints_failed"] == 0
    assert verify(run.base / "interrupted")[1] == 0


def test_a_run_that_begins_at_a_checkpoint_of_another(run, world):
    uninterrupted = run("one", run__checkpoint_every=2)
    summary = (run.base / "one" / "summary.json").read_text()
    world.gather_objects(None)
    run("one", run__checkpoint_every=2)
    assert (run.base / "one" / "summary.json").read_text() == summary, "a finished run is left alone"
    path = run.base / "one" / "checkpoints" / step_name(2)
    train_on = {"run__resume": path, "run__checkpoint_every": 1}
    with pytest.raises(AssertionError, match="3"):
        run("two", **train_on, run__steps=4)  # its metrics begin at step 3
    found = lines(run.base / "two")
    assert [line["step"] for line in found] == [3, 4]
    np.testing.assert_allclose([line["loss"] for line in found], uninterrupted[2:4], rtol=1e-5)
    world.gather_objects(None)
    with pytest.raises(AssertionError, match="3"):
        run("two", **train_on)  # started once more, as by a scheduler: goes on, not back
    assert list(steps_in(run.base / "two" / "checkpoints")) == [3, 4, 5, 6]


def test_never_means_the_first_start_of_a_job(run, monkeypatch):
    settings = {"run__resume": "never", "run__checkpoint_every": 2}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    first = run("run", run__steps=4, **settings)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run("run", **settings)[:4] == first
    assert not (run.base / "run" / "earlier-1").exists(), "it went on"
    monkeypatch.setenv("SLURM_JOB_ID", "8")  # stopped and queued again before it began, beside what another job left
    assert run("run", run__steps=4, **settings) == pytest.approx(first, rel=1e-5)
    assert list(steps_in(run.base / "run" / "earlier-1" / "checkpoints")) == [2, 4, 6]
    assert losses(run.base / "run" / "earlier-1")[:4] == first


@pytest.fixture(scope="module")
def one_run(world, shared_dir, dataset_path):
    """A run of two steps that has saved."""
    changes = {"run.dir": shared_dir / "refused" / "one", "run.steps": 2, "run.checkpoint_every": 2}
    train(configure(dataset_path, **(SETTINGS | changes)), world)
    world.gather_objects(None)
    return shared_dir / "refused" / "one"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model__config__hidden_size": 40}, "of another model"),
        (
            {"model__config__num_attention_heads": 8, "model__config__num_key_value_heads": 4},
            "of another model: num_attention_heads is 4 there, 8 in",
        ),
        ({"model__config__rope_parameters__rope_theta": 500.0}, "rope_theta is 10000.0 there, 500.0 in"),
        ({"optim__optimizer": "sgd"}, "optim.optimizer: expected adamw"),
        ({"run__seed": 1}, "run.seed: expected 0"),
        ({"run__resume": "/nowhere"}, "no checkpoint in /nowhere"),
        ({"run__steps": 1, "run__resume": "one", "run__dir": "other"}, "run.steps: expected more than the 2"),
    ],
    ids=["model", "heads", "positions", "optimizer", "seed", "path", "steps"],
)
def test_what_does_not_fit_is_refused(run, one_run, settings, words):
    settings = {"run__dir": one_run} | {
        key: one_run.with_name(value) if value in ("one", "other") else value for key, value in settings.items()
    }
    before = sorted(one_run.rglob("*"))
    with pytest.raises(AllRanksUserError, match=words):
        run("unused", **settings)
    assert sorted(one_run.rglob("*")) == before, "nothing was touched"


@pytest.mark.parametrize("difference", ["vocabulary", "token"])
def test_other_data_is_refused(run, one_run, world, dataset_path, shared_dir, difference):
    other = shared_dir / f"other_{difference}.h5"
    if world.rank == 0:
        names = {"tokenizer": "none", "source": "", "vocabulary": "another" if difference == "vocabulary" else ""}
        with Dataset(dataset_path) as known, DatasetWriter(other, vocab_size=known.vocab_size, **names) as writer:
            for i, (tokens, mask) in enumerate(known):
                tokens[0] ^= i == 20 and difference == "token"
                writer.append(tokens.astype(np.uint32), mask)
    world.gather_objects(None)
    with pytest.raises(AllRanksUserError, match="got other data"):
        run("unused", run__dir=one_run, data__path=other)


@pytest.mark.sizes(1, 2, 3, 4)  # by a kind of damage each
def test_the_newest_is_damaged(run, world, capfd):
    damage = ("cut", "missing", "manifest", "swapped")[world.size % 4]
    run("run", run__steps=4, run__checkpoint_every=2)
    old, new = (run.base / "run" / "checkpoints" / step_name(step) for step in (2, 4))
    shard = new / shard_name(4, world.size - 1)
    world.gather_objects(None)
    if world.rank == 0:
        if damage == "cut":
            shard.write_bytes(shard.read_bytes()[:-1])
        elif damage == "swapped":
            shard.write_bytes((old / shard_name(2, world.size - 1)).read_bytes())
        else:
            (shard if damage == "missing" else new / "manifest.json").unlink()
    world.gather_objects(None)
    assert len(run("run", run__steps=4, run__checkpoint_every=2)) == 4
    if world.rank == 0:
        assert "WARNING" in capfd.readouterr().out
    assert verify(run.base / "run")[1] == 0
    assert list(steps_in(run.base / "run" / "earlier-1" / "checkpoints")) == [4], "nothing is thrown away"
    world.gather_objects(None)
    if world.rank == 0:
        for path in (run.base / "run" / "checkpoints").glob("*/*_rank_00000.h5"):
            path.unlink()
    world.gather_objects(None)
    with pytest.raises(AllRanksUserError, match=r"complete checkpoint, got none among 2; the newest: .*04"):
        run("run")
    if world.rank == 0:
        assert capfd.readouterr().out.count("trying the next older checkpoint") == 1, "there is none after the oldest"


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_tensor_is_damaged(run, world, part):
    """It shows when it is read, on the ranks that read it, and all of them end."""
    run("run", run__steps=2, run__checkpoint_every=2)
    if world.rank == 0:
        path = run.base / "run" / "checkpoints" / step_name(2) / shard_name(2, world.size - 1)
        with h5py.File(path) as file:
            datasets = []
            file[part].visititems(lambda _, item: datasets.append(item) if isinstance(item, h5py.Dataset) else None)
            name, position = datasets[-1].name.lstrip("/"), datasets[-1].id.get_offset()
        flip(path, position)
    world.gather_objects(None)
    with pytest.raises(AllRanksUserError, match=f"the checksum of {part}/.* does not match: if .* set run.resume"):
        run("run")
    if world.rank == 0:
        flip(path, position)
        assert verify(run.base / "run")[1] == 0, f"{name} is as it was"
    world.gather_objects(None)
    assert len(run("run")) == STEPS


def test_steps_that_are_shorter_than_writing(run, world, monkeypatch):
    """Whenever a save begins, the one before it is complete: two intervals are all that can be lost."""
    write, save, behind = saver.write_shard, checkpointing.CheckpointCallback._save, []

    def slow(*arguments):
        time.sleep(0.15 if world.rank == world.size - 1 else 0.0)
        return write(*arguments)

    def check_before_save(self, step):
        save(self, step)
        behind.append(step - max(steps_in(run.base / "run" / "checkpoints"), default=0))

    monkeypatch.setattr(saver, "write_shard", slow)
    monkeypatch.setattr(checkpointing.CheckpointCallback, "_save", check_before_save)
    run("run", run__checkpoint_every=1)
    if world.rank == 0:
        assert max(behind) <= 1, behind
    assert list(steps_in(run.base / "run" / "checkpoints")) == list(range(1, STEPS + 1))


def test_a_run_that_goes_nowhere_keeps_its_last_checkpoint(run, world, monkeypatch):
    write = saver.write_shard

    def slow(*arguments):
        time.sleep(0.5)  # beyond the end of the step that fails
        return write(*arguments)

    monkeypatch.setattr(saver, "write_shard", slow)
    settings = {"optim__optimizer": "sgd", "optim__learning_rate": 1e30, "optim__max_grad_norm": 0}
    settings |= {"optim__warmup_steps": 0, "run__max_skipped_steps": 1}
    with pytest.raises(TrainingError, match="the gradient was not finite"):
        run("run", run__checkpoint_every=1, **settings)
    assert list(steps_in(run.base / "run" / "checkpoints")) == [1]


def test_a_path_is_not_held_up_by_damage_in_the_own_directory(run, world, one_run, capfd):
    run("run", run__steps=4, run__checkpoint_every=4, run__seed=1)
    if world.rank == 0:
        directory = run.base / "run" / "checkpoints" / step_name(4)
        write_manifest(directory / "manifest.json", replace(read_manifest(directory), metadata={}))
    world.gather_objects(None)
    with pytest.raises(AssertionError, match="3"):
        run("run", run__resume=one_run, run__steps=3)  # its metrics begin at step 3
    if world.rank == 0:
        errors = capfd.readouterr().err
        assert "(run.resume: expected a complete checkpoint" in errors
        assert "is not of a training run: its metadata lack architectures, config, " in errors


def test_learned_costs_and_run_info_are_saved(run, world, monkeypatch):
    settings = {"data__cost": "fitted", "data__max_tokens_per_microbatch": 40}
    observe = FittedCostModel.observe
    # Real times of so small a model are all alike, but for noise: what is learned may be nothing.
    monkeypatch.setattr(
        FittedCostModel, "observe", lambda self, lengths, _: observe(self, lengths, 1e-3 * lengths.sum())
    )
    run("run", run__checkpoint_every=STEPS, **settings)
    metadata = read_manifest(run.base / "run" / "checkpoints" / step_name(STEPS)).metadata
    assert metadata["config"]["optim"]["learning_rate"] == 1e-2 and metadata["config"]["data"]["cost"] == "fitted"
    assert {"odc_mpi", "python", "torch", "transformers", "numpy", "h5py", "mpi4py"} == metadata["versions"].keys()
    restored, load = [], FitCostModel.load_state_dict

    def record_metadata(self, metadata):
        prior = self._loader.cost
        load(self, metadata)
        restored.append((json.loads(json.dumps(self._fitted.state_dict())), self._loader.cost != prior))

    monkeypatch.setattr(FitCostModel, "load_state_dict", record_metadata)
    run("run", run__steps=STEPS + 1, **settings)
    assert restored == [(metadata["cost"], True)]


@pytest.mark.sizes(2, 3)
def test_a_schedule_goes_on(run, world, monkeypatch):
    """After a stop that one rank was asked for by a signal."""
    settings = {"optim__lr_scheduler_type": "linear", "optim__warmup_steps": 4}
    uninterrupted = run("uninterrupted", **settings)
    rates = [line["learning_rate"] for line in lines(run.base / "uninterrupted")]
    assert len(set(rates)) > 4, "it rises and falls"
    original, steps = StopRequest.local_values, iter(range(1, STEPS + 1))

    def values_after_signal(self):
        if next(steps) == 2 and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return original(self)

    monkeypatch.setattr(StopRequest, "local_values", values_after_signal)
    with pytest.raises(StoppedError, match="after step 2; checkpoint saved"):
        run("interrupted", **settings)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    world.gather_objects(None)
    monkeypatch.undo()
    np.testing.assert_allclose(run("interrupted", **settings), uninterrupted, rtol=1e-5)
    assert [line["learning_rate"] for line in lines(run.base / "interrupted")] == rates


def test_a_rank_that_cannot_write(run, world, monkeypatch, capfd):
    def full(*_):
        raise OSError(28, "No space left on device")

    if world.rank == world.size - 1:
        monkeypatch.setattr("odc_mpi.checkpoint.saver.write_shard", full)
    with pytest.raises(TrainingError, match="the last checkpoint, of step 6, could not be written"):
        run("run", run__checkpoint_every=2)
    assert len(losses(run.base / "run")) == STEPS, "the training went on"
    assert list((run.base / "run" / "checkpoints").iterdir()) == []
    if world.rank == 0:
        errors = capfd.readouterr().err
        assert errors.count("not saved: ") == 3


@pytest.mark.sizes(4)
def test_frozen_parameters_that_each_node_has_are_saved_once(world, monkeypatch):
    """Nodes of three ranks and of one. The frozen parameters, of two types, are in one array of bytes."""
    world, digests = on_nodes_of_three(world, monkeypatch), []
    for scope in ("world", "node"):
        torch.manual_seed(5)
        module = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 3))
        module[0].requires_grad_(False).bias.data = module[0].bias.bfloat16()
        model = shard_model(module, world, units=[torch.nn.Linear], comm=CommConfig(frozen_scope=scope))
        assert any(layout.node_ranks for layout in model.layouts) == (scope == "node")
        state = TrainingState(model, torch.optim.AdamW(model.shard_parameters()), world.rank)
        saved = sum(world.gather_objects(sum(each.tensor.numel() for each in state.tensor_ranges())))
        digests.append((checkpointing.state_digest(world, state), saved))
        model.close()
    assert digests[0] == digests[1]

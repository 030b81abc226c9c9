"""Training does not notice evaluations; checkpoints that they choose; epochs."""

import numpy as np
import pytest
from small_training import configure, train_to_the_end

from odc_mpi.checkpoint.manifest import steps_in
from odc_mpi.errors import AllRanksUserError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]


@pytest.fixture
def run(world, base, dataset_path):
    """`run(name, **settings)` trains in a directory of that name; returns its metrics and its summary."""

    def start(name, **settings):
        return train_to_the_end(
            configure(dataset_path, run__dir=base / name, model__config__num_hidden_layers=1, **settings), world
        )

    start.base, start.held_out = base, dataset_path.with_suffix(".eval.h5")
    return start


@pytest.mark.sizes(2, 3)
def test_training_does_not_notice_evaluations(run):
    """With dropout it would notice random numbers that are drawn, and the mode in which the model is left."""
    settings = {"model__config__attention_dropout": 0.3, "run__steps": 5}
    without, _ = run("without", **settings)
    (first, *lines), summary = run(
        "with", data__eval_path=run.held_out, run__eval_every=2, run__eval_on_start="true", **settings
    )
    names = {"step", "time", "epoch", "eval_loss", "eval_perplexity", "eval_mean_token_accuracy", "eval_s"}
    assert first.keys() == names and first["step"] == 0
    evaluated = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert list(evaluated) == [2, 4, 5]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in without], rel=1e-6)
    assert summary["eval_loss_start"] == first["eval_loss"] and summary["eval_loss"] == evaluated[5]
    assert summary["eval_loss_best"] == min(evaluated.values())
    assert summary["eval_perplexity"] == pytest.approx(np.exp(evaluated[5]))
    plainly, _ = run("plainly", run__steps=1)
    assert abs(plainly[0]["loss"] - lines[0]["loss"]) > 1e-4, "dropout did nothing"


def test_the_best_checkpoint_is_kept_besides_the_newest_also_by_a_run_that_goes_on(world, run, dataset_path):
    """The training data themselves, at a rate with which the loss first falls and then explodes."""
    settings = {
        "data__eval_path": dataset_path,
        "run__eval_every": 1,
        "run__checkpoint_every": 1,
        "run__keep_checkpoints": 1,
        "run__keep_best": "true",
        "optim__lr_scheduler_type": "constant",
        "optim__max_grad_norm": 0,
    }
    lines, summary = run("run", run__steps=3, **settings)
    best = min(lines, key=lambda line: line["eval_loss"])["step"]
    assert best == 3 == summary["best_checkpoint"]
    lines, summary = run("run", run__steps=6, optim__learning_rate=3.0, **settings)
    assert min(lines, key=lambda line: line["eval_loss"])["step"] == 3 == summary["best_checkpoint"]
    assert list(steps_in(run.base / "run" / "checkpoints")) == [3, 6]


def test_epochs_instead_of_steps(run):
    # 40 sequences in minibatches of 7: six a pass.
    lines, _ = run("half", run__num_train_epochs=0.5, run__steps=None)
    assert len(lines) == 3
    assert "steps: 3" in (run.base / "half" / "config.yaml").read_text()
    lines, _ = run("neither", run__steps=None)
    assert len(lines) == 6, "one pass"


def test_epochs_of_a_run_that_is_resumed_with_other_minibatches(world, run, capsys):
    """Forty sequences: two minibatches of 7, then two of the first epoch and two of each other one."""
    run("resumed", run__checkpoint_every=1, run__steps=2)
    lines, _ = run("resumed", data__minibatch_sequences=20, run__steps=None, run__num_train_epochs=3)
    assert [line["epoch"] for line in lines] == [7 / 40, 14 / 40, 34 / 40, 1, 1.5, 2, 2.5, 3]
    assert ("40 sequences, 20 per step, 8 steps (3 epochs)" in capsys.readouterr().out) == (world.rank == 0)


def test_held_out_data_that_do_not_fit_are_refused(run, shared_dir):
    with pytest.raises(AllRanksUserError, match=r"data\.max_tokens_per_microbatch"):
        run("long", data__eval_path=run.held_out, data__max_tokens_per_microbatch=45)
    with pytest.raises(AllRanksUserError, match=r"nowhere\.h5"):
        run("absent", data__eval_path=shared_dir / "nowhere.h5")

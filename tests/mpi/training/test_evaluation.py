"""The loss over held-out sequences is that of plain torch, and training does not notice."""

import numpy as np
import pytest
import torch
import torch_reference
from small_training import QWEN2, configure, train_to_the_end

from odc_mpi.checkpoint.manifest import steps_in
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.errors import AllRanksUserError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]

NUM_HELD_OUT = 13


@pytest.fixture(scope="module")
def held_out(world, shared_dir):
    """Sequences of 2 to 60 tokens, of which some are trained."""
    path = shared_dir / "held_out.h5"
    if world.rank == 0:
        rng = np.random.default_rng(11)
        with DatasetWriter(path, vocab_size=QWEN2["vocab_size"], tokenizer="none", source="random") as writer:
            for length in rng.integers(2, 61, size=NUM_HELD_OUT):
                mask = rng.random(length) < 0.6
                mask[-1] = True
                writer.append(rng.integers(0, QWEN2["vocab_size"], size=length).astype(np.uint32), mask)
    world.gather_objects(None)
    return path


@pytest.fixture
def run(world, base, dataset_path):
    """`run(name, **settings)` trains in a directory of that name; returns its metrics and its summary."""

    def start(name, **settings):
        changes = {key.replace("__", "."): value for key, value in settings.items()}
        return train_to_the_end(configure(dataset_path, **({"run.dir": base / name} | changes)), world)

    start.base = base
    return start


def wanted_before_training(path, count=NUM_HELD_OUT):
    reference = torch_reference.initial_model(configure("unused"))
    with Dataset(path) as dataset, torch.no_grad():
        correct = trained = 0
        for tokens, loss_mask in (dataset[index] for index in range(count)):
            tokens, has_loss = torch.from_numpy(tokens), torch.from_numpy(loss_mask)[1:].bool()
            found = reference(input_ids=tokens[None]).logits[0, :-1].argmax(-1)
            correct, trained = correct + int((found == tokens[1:])[has_loss].sum()), trained + int(has_loss.sum())
        return float(torch_reference.compute_loss(reference, dataset, range(count))), correct / trained


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(("balance", "count"), [("lb_mini", 0), ("dynamic", 5)])
def test_it_is_the_loss_of_plain_torch_and_training_does_not_notice(run, held_out, balance, count):
    settings = {"data__balance": balance}
    without, _ = run("without", **settings)
    lines, summary = run(
        "with",
        data__eval_path=held_out,
        data__eval_sequences=count,
        run__eval_every=2,
        run__eval_on_start="true",
        **settings,
    )
    first, *lines = lines
    names = {"step", "time", "epoch", "eval_loss", "eval_perplexity", "eval_mean_token_accuracy", "eval_s"}
    assert first.keys() == names and first["step"] == 0
    loss, accuracy = wanted_before_training(held_out, count or NUM_HELD_OUT)
    assert first["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert first["eval_mean_token_accuracy"] == accuracy
    evaluated = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert list(evaluated) == [2, 4, 5]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in without], rel=1e-6)
    assert summary["eval_loss_start"] == first["eval_loss"] and summary["eval_loss"] == evaluated[5]
    assert summary["eval_loss_best"] == min(evaluated.values())
    assert summary["eval_perplexity"] == pytest.approx(np.exp(evaluated[5]))


def test_evaluating_draws_on_no_random_numbers_and_ends_in_training_mode(world, run, held_out):
    """With dropout a run would notice either."""
    settings = {"model__config__attention_dropout": 0.3}
    without, _ = run("without", **settings)
    (_, *lines), _ = run("with", data__eval_path=held_out, run__eval_every=1, run__eval_on_start="true", **settings)
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in without], rel=1e-6)
    plainly, _ = run("plainly")
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


def test_held_out_data_that_do_not_fit_are_refused(run, shared_dir, held_out):
    with pytest.raises(AllRanksUserError, match=r"data\.max_tokens_per_microbatch"):
        run("long", data__eval_path=held_out, data__max_tokens_per_microbatch=45)
    with pytest.raises(AllRanksUserError, match=r"nowhere\.h5"):
        run("absent", data__eval_path=shared_dir / "nowhere.h5")

"""Preference optimization on all ranks is that of a plain loop, which computes each answer as a sequence of its own."""

import copy
import itertools
import math
import shutil
import time

import pytest
import torch
import torch_reference
from exact_runs import ExactRuns
from pair_files import answer_rows
from small_training import QWEN2, assert_saved, configure, first_minibatches, on_first_rank, train_to_the_end
from torch.nn.functional import logsigmoid

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.errors import AllRanksUserError, StoppedError
from odc_mpi.models import families, token_logps
from odc_mpi.training.recipes.dpo import reference as reference_module
from odc_mpi.training.stop import StopRequest

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]

BETA = 0.1


def settings(pairs_path, base, **changes):
    return configure(
        pairs_path,
        **{
            "run.objective": "dpo",
            "data.eval_path": pairs_path.with_suffix(".eval.h5"),
            "run.eval_on_start": True,
            "run.dir": base,
            "optim.warmup_steps": 0,
            **changes,
        },
    )


def answer_logps(module, dataset, index):
    """The log-probabilities of both answers, `[2]`."""
    num_prompt, sums = dataset.columns["num_prompt_tokens"][index], []
    for row in answer_rows(dataset, [index]):
        logps = module(input_ids=row[None, :-1], use_cache=False).logits[0].log_softmax(-1)
        sums.append(logps.gather(1, row[1:, None])[num_prompt - 1 :].double().sum())
    return torch.stack(sums)


def plain_losses(config, dataset, module):
    """Train the module, and return its losses."""
    frozen = copy.deepcopy(module)

    def compute_loss(module, dataset, indices):
        losses = []
        for index in indices:
            with torch.no_grad():
                reference = answer_logps(frozen, dataset, index)
            ratios = answer_logps(module, dataset, index) - reference
            losses.append(-logsigmoid(BETA * (ratios[0] - ratios[1])))
        return torch.stack(losses).mean()

    return torch_reference.train(module, dataset, first_minibatches(config, dataset), config.optim, compute_loss)


@pytest.mark.parametrize(
    ("balance", "packs"),
    [
        pytest.param("lb_mini", True, marks=pytest.mark.sizes(3)),
        pytest.param("dynamic", True, marks=pytest.mark.sizes(1, 2)),
        pytest.param("dynamic", False, marks=pytest.mark.sizes(2)),
    ],
)
def test_losses_and_parameters_are_those_of_a_plain_loop(world, pairs_path, base, monkeypatch, balance, packs):
    """Log-probabilities are computed in blocks of three, of which ranks need different numbers."""
    monkeypatch.setitem(token_logps.MAX_ELEMENTS, "cpu", 3 * QWEN2["vocab_size"])
    if not packs:
        monkeypatch.setattr(families, "_unpacked_reason", lambda module: "a test")
    config = settings(pairs_path, base, **{"data.balance": balance})
    lines, summary = train_to_the_end(config, world)

    def compare():
        start, *steps = lines
        for line, prefix in ((start, "eval_"), (steps[0], "")):
            assert line[f"{prefix}loss"] == pytest.approx(math.log(2), abs=1e-6)
            assert line[f"{prefix}rewards/margins"] == pytest.approx(0, abs=1e-6)
        assert start["eval_rewards/accuracies"] == 0.5
        module = torch_reference.initial_model(config)
        with Dataset(pairs_path) as dataset:
            losses = plain_losses(config, dataset, module)
        assert [line["loss"] for line in steps] == pytest.approx(losses, rel=1e-6)
        assert_saved(base, module)
        with Dataset(pairs_path.with_suffix(".eval.h5")) as held_out, torch.no_grad():
            first = torch_reference.initial_model(config)
            ratios = torch.stack(
                [answer_logps(module, held_out, i) - answer_logps(first, held_out, i) for i in range(10)]
            )
        rewards = BETA * ratios
        assert steps[-1]["eval_rewards/chosen"] == pytest.approx(rewards[:, 0].mean().item(), rel=1e-4)
        assert steps[-1]["eval_rewards/accuracies"] == (rewards[:, 0] > rewards[:, 1]).double().mean().item()
        margins = rewards[:, 0] - rewards[:, 1]
        assert steps[-1]["eval_loss"] == pytest.approx(-logsigmoid(margins).mean().item(), rel=1e-5)
        assert summary["eval_loss"] == steps[-1]["eval_loss"]

    on_first_rank(world, compare)


@pytest.mark.parametrize(
    "balance",
    [pytest.param("lb_mini", marks=pytest.mark.sizes(2)), pytest.param("dynamic", marks=pytest.mark.sizes(3))],
)
def test_exact_runs_have_the_bits_of_one_rank(world, pairs_path, base, balance):
    exact = ExactRuns(world, base, lambda folder, changes: settings(pairs_path, folder, **changes))
    changes = {"run__exact": True, "data__balance": balance, "run__steps": 3}
    found = exact.train("all", world, **changes)
    assert found == exact.alone(**changes)
    names = [name for name in found[1][-1] if name.startswith(("eval_", "rewards/", "logps/"))]
    assert len(names) > 10


@pytest.mark.sizes(2)
def test_a_stopped_reference_pass_continues_on_other_ranks(world, pairs_path, base, monkeypatch):
    monkeypatch.setattr(reference_module, "BLOCK", 16)
    computed = []
    score = reference_module.ReferenceLogps._score

    def count(self, microbatch):
        computed.extend(microbatch.indices.tolist())
        return score(self, microbatch)

    monkeypatch.setattr(reference_module.ReferenceLogps, "_score", count)
    config = settings(pairs_path, base)
    write = reference_module.ReferenceLogps._write

    def write_and_stop(self):
        write(self)
        stop.requested = True

    with StopRequest() as stop, monkeypatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(reference_module.ReferenceLogps, "_write", write_and_stop)
        train_to_the_end(config, world, stop=stop)
    first = sorted(itertools.chain(*world.gather_objects(computed)))
    computed.clear()
    lines, _ = train_to_the_end(config, world)
    others = sorted(itertools.chain(*world.gather_objects(computed)))
    with Dataset(pairs_path) as dataset:
        needed = sorted(itertools.chain(*first_minibatches(config, dataset)))
    # Of forty pairs the run needs thirty-five; ten are held out.
    assert first == needed[:16] and others == sorted([*needed[16:], *range(10)])
    assert lines[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.sizes(2)
def test_log_probabilities_of_another_model_are_not_used(world, pairs_path, base):
    """Each run starts in the directory of the one before, with other weights, another setting, and another type."""
    changes = {"run.resume": "never", "run.steps": 1}
    for change in ({}, {"run.seed": 1}, {"model.config.rms_norm_eps": 0.5}, {"model.param_dtype": "bfloat16"}):
        changes |= change
        lines, _ = train_to_the_end(settings(pairs_path, base, **changes), world)
        assert lines[1]["rewards/margins"] == pytest.approx(0, abs=1e-6), change


@pytest.mark.sizes(2)
def test_log_probabilities_that_cannot_be_written_end_the_run(world, pairs_path, base):
    on_first_rank(world, lambda: (base / reference_module.FILE).mkdir(parents=True))
    with pytest.raises(AllRanksUserError, match=rf"run\.dir: .*{reference_module.FILE}: Is a directory"):
        train_to_the_end(settings(pairs_path, base), world)


@pytest.mark.sizes(2)
def test_a_slow_rank_does_not_delay_the_reference_pass(world, pairs_path, base, monkeypatch):
    """Rank 1 waits until rank 0 has computed all pairs, except those of a microbatch that rank 1 has claimed."""
    score, claimed = reference_module.ReferenceLogps._score, base / "claimed"

    def wait_for(condition):
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end, "the other rank does not continue"
            time.sleep(0.001)

    def score_slowly(self, microbatch):
        if world.rank == 0:
            wait_for(claimed.exists)
        elif not claimed.exists():
            claimed.touch()
            wait_for(lambda: len(list(base.glob("pair_*"))) + len(microbatch.indices) >= 35)
        result = score(self, microbatch)
        for index in microbatch.indices:
            (base / f"pair_{world.rank}_{index}").touch()
        return result

    monkeypatch.setattr(reference_module.ReferenceLogps, "_score", score_slowly)
    changes = {"data.eval_path": None, "run.eval_on_start": None}
    lines, _ = train_to_the_end(settings(pairs_path, base, **changes), world)
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert len(list(base.glob("pair_*"))) == 35


@pytest.mark.sizes(2)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(world, pairs_path, base):
    changes = {"run.exact": True, "run.checkpoint_every": 2}
    config = settings(pairs_path, base, **changes)
    whole, _ = train_to_the_end(config, world)

    def forget(*steps):
        for step in steps:
            shutil.rmtree(base / "checkpoints" / f"step_{step:08d}")

    on_first_rank(world, lambda: forget(4, 5))
    lines, _ = train_to_the_end(config, world)
    assert lines[3:] and [line.get("loss") for line in lines] == [line.get("loss") for line in whole]
    with pytest.raises(AllRanksUserError, match=r"run\.objective: expected dpo, that of the checkpoint"):
        train_to_the_end(
            settings(pairs_path, base, **{"run.objective": "reward", "model.config.pad_token_id": 0}), world
        )
    # Another run continues with the values in the directory of the checkpoint.
    on_first_rank(world, lambda: forget(4, 5))
    other, _ = train_to_the_end(settings(pairs_path, base / "other", **changes, **{"run.resume": base}), world)
    assert [line["loss"] for line in other] == [line["loss"] for line in whole[3:]]
    # Without the values of the model before training, nothing can continue.
    on_first_rank(world, lambda: [(base / reference_module.FILE).unlink()])
    with pytest.raises(AllRanksUserError, match="cannot be computed after training has begun"):
        train_to_the_end(config, world)


@pytest.mark.sizes(2)
def test_data_without_pairs_and_pairs_for_other_objectives_are_refused(world, pairs_path, dataset_path, base):
    with pytest.raises(AllRanksUserError, match=r"has sequences without preferences, but run\.objective is dpo: set"):
        train_to_the_end(settings(dataset_path, base), world)
    with pytest.raises(AllRanksUserError, match=r"run\.objective is sft"):
        train_to_the_end(settings(pairs_path, base, **{"run.objective": "sft"}), world)


@pytest.mark.sizes(2)
def test_the_reference_of_adapters_is_the_model_at_the_start(world, pairs_path, base):
    """That is the base for new adapters; adapters that are trained further are part of it."""
    pytest.importorskip("peft")
    first, summary = train_to_the_end(settings(pairs_path, base / "first", **{"lora.r": 2}), world)
    assert summary["num_trained_parameters"] < summary["num_parameters"] / 4
    assert first[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    changes = {"lora.r": 2, "model.path": base / "first"}
    second, _ = train_to_the_end(settings(pairs_path, base / "second", **changes), world)
    assert second[0]["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    # The log-probabilities are those of the trained adapters.
    assert second[0]["eval_logps/chosen"] == pytest.approx(first[-1]["eval_logps/chosen"], rel=1e-6)

"""The pass of the reference model over all pairs on all ranks, runs that go on, and what is refused."""

import itertools
import math
import shutil
import time

import pytest
from small_training import configure, first_minibatches, on_first_rank, train_to_the_end

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.errors import AllRanksUserError, StoppedError
from odc_mpi.training.recipes.dpo import reference as reference_module
from odc_mpi.training.stop import StopRequest

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]

BETA = 0.1


#: One layer, and no evaluation.
SHORT = {"data.eval_path": None, "run.eval_on_start": None, "model.config.num_hidden_layers": 1}


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


def test_log_probabilities_of_another_model_are_not_used(world, pairs_path, base):
    """Each run starts in the directory of the one before, with other weights, another setting, and another type."""
    changes = SHORT | {"run.resume": "never", "run.steps": 1}
    for change in ({}, {"run.seed": 1}, {"model.config.rms_norm_eps": 0.5}, {"model.param_dtype": "bfloat16"}):
        changes |= change
        lines, _ = train_to_the_end(settings(pairs_path, base, **changes), world)
        assert lines[0]["rewards/margins"] == pytest.approx(0, abs=1e-6), change


def test_log_probabilities_that_cannot_be_written_end_the_run(world, pairs_path, base):
    on_first_rank(world, lambda: (base / reference_module.FILE).mkdir(parents=True))
    with pytest.raises(AllRanksUserError, match=rf"run\.dir: .*{reference_module.FILE}: Is a directory"):
        train_to_the_end(settings(pairs_path, base), world)


def test_a_slow_rank_does_not_delay_the_reference_pass(world, pairs_path, base, monkeypatch):
    """Rank 1 waits until rank 0 has computed all pairs, except those of a microbatch that rank 1 has claimed."""
    score, claimed = reference_module.ReferenceLogps._score, base / "claimed"
    config = settings(pairs_path, base, **SHORT)
    num_used = config.run.steps * config.data.minibatch_sequences

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
            wait_for(lambda: len(list(base.glob("pair_*"))) + len(microbatch.indices) >= num_used)
        result = score(self, microbatch)
        for index in microbatch.indices:
            (base / f"pair_{world.rank}_{index}").touch()
        return result

    monkeypatch.setattr(reference_module.ReferenceLogps, "_score", score_slowly)
    lines, _ = train_to_the_end(config, world)
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert len(list(base.glob("pair_*"))) == num_used


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(world, pairs_path, base):
    changes = SHORT | {"run.exact": True, "run.checkpoint_every": 2, "run.steps": 3}
    config = settings(pairs_path, base, **changes)
    whole, _ = train_to_the_end(config, world)

    def forget(*steps):
        for step in steps:
            shutil.rmtree(base / "checkpoints" / f"step_{step:08d}")

    on_first_rank(world, lambda: forget(3))
    lines, _ = train_to_the_end(config, world)
    assert lines[2:] and [line.get("loss") for line in lines] == [line.get("loss") for line in whole]
    with pytest.raises(AllRanksUserError, match=r"run\.objective: expected dpo, that of the checkpoint"):
        train_to_the_end(
            settings(pairs_path, base, **changes, **{"run.objective": "reward", "model.config.pad_token_id": 0}), world
        )
    # Another run continues with the values in the directory of the checkpoint.
    on_first_rank(world, lambda: forget(3))
    other, _ = train_to_the_end(settings(pairs_path, base / "other", **changes, **{"run.resume": base}), world)
    assert [line["loss"] for line in other] == [line["loss"] for line in whole[2:]]
    # Without the values of the model before training, nothing can continue.
    on_first_rank(world, lambda: [(base / reference_module.FILE).unlink()])
    with pytest.raises(AllRanksUserError, match="cannot be computed after training has begun"):
        train_to_the_end(config, world)


def test_data_without_pairs_and_pairs_for_other_objectives_are_refused(world, pairs_path, dataset_path, base):
    with pytest.raises(AllRanksUserError, match=r"has sequences without preferences, but run\.objective is dpo: set"):
        train_to_the_end(settings(dataset_path, base), world)
    with pytest.raises(AllRanksUserError, match=r"run\.objective is sft"):
        train_to_the_end(settings(pairs_path, base, **{"run.objective": "sft"}), world)


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

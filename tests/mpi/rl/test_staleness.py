"""Rollouts without waiting: each prompt once, in its step, from parameters that are not too old, with late ranks."""

import random
import time
from collections import Counter

import numpy as np
import pytest
from grpo_job import NUM_GENERATIONS, make_settings, only_reward
from small_training import train_to_the_end

from odc_mpi.errors import AllRanksUserError
from odc_mpi.rollout.decode import Decoder
from odc_mpi.training.recipes.rollouts import carried
from odc_mpi.training.recipes.rollouts.source import RolloutSource
from odc_mpi.training.recipes.rollouts.step_rollouts import StepRollouts

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]

NUM_STEPS = 15


@pytest.fixture
def run(world, grpo_dir, base):
    def start(name="run", **changes):
        settings = {"run__dir": base / name, "run__steps": NUM_STEPS, "rl__max_completion_length": 6}
        return train_to_the_end(make_settings(grpo_dir, **settings | changes), world)

    start.path = grpo_dir
    return start


@pytest.fixture
def generated(world, monkeypatch):
    """The step and the position of each group that was generated, on this rank."""
    found, finish = [], StepRollouts.finish

    def recorded(step, position, group):
        found.append((step.number, position))
        return finish(step, position, group)

    monkeypatch.setattr(StepRollouts, "finish", recorded)
    return found


@pytest.fixture
def late_ranks(world, monkeypatch):
    """Ranks that decode and train at speeds of their own, and sometimes stall."""
    draws, report, pack = random.Random(world.rank), RolloutSource._report_token, RolloutSource._pack

    def late_token(source, token):
        time.sleep(draws.choice([0, 0, 0, 0.002 * world.rank, 0.05 * (draws.random() < 0.02)]))
        report(source, token)

    def late_pack(source, groups):
        time.sleep(draws.choice([0, 0, 0.01]))
        return pack(source, groups)

    monkeypatch.setattr(RolloutSource, "_report_token", late_token)
    monkeypatch.setattr(RolloutSource, "_pack", late_pack)


@pytest.mark.parametrize(("max_staleness", "store_bytes"), [(1, "16M"), (3, "4K"), (2, 0)])
def test_each_prompt_is_trained_once_in_its_step(world, run, generated, late_ranks, max_staleness, store_bytes):
    lines, _ = run(rl__max_staleness=max_staleness, rl__store_bytes=store_bytes)
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    everyone = Counter(each for found in world.gather_objects(generated) for each in found)
    expected = {(step, i) for step in range(1, NUM_STEPS + 1) for i in range(6 if step % 3 else 2)}  # of 14 prompts
    assert everyone == Counter(expected)
    largest = [line["staleness/max"] for line in lines]
    assert largest[0] == 0 < max(largest) <= max_staleness
    for line in lines:
        assert 0 <= line["staleness/mean"] <= line["staleness/max"]
        assert line["staleness/max"] < line["step"]
        count = 6 if line["step"] % 3 else 2
        assert line["groups_generated_max"] <= count and line["num_tokens"] >= count * NUM_GENERATIONS
        trained = count - round(line["frac_reward_zero_std"] * count)
        assert line["groups_trained_max"] <= trained <= world.size * line["groups_trained_max"]
    assert np.isfinite([line["loss"] for line in lines]).all()


@pytest.mark.sizes(2)
@pytest.mark.parametrize("stale_kv", ["keep", "recompute"])
def test_completions_go_on_with_the_parameters_of_the_next_step(run, late_ranks, monkeypatch, stale_kv):
    recomputed, recompute = [], Decoder.recompute
    monkeypatch.setattr(Decoder, "recompute", lambda batch: (recomputed.append(len(batch.prompts)), recompute(batch)))
    lines, _ = run(rl__max_staleness=2, rl__stale_kv=stale_kv, run__steps=9, rl__max_completion_length=30)
    assert bool(recomputed) == (stale_kv == "recompute") and all(recomputed)
    assert max(line["staleness/max"] for line in lines) > 0


@pytest.mark.sizes(2)
def test_a_resumed_run_says_that_completions_are_generated_again(world, run, capfd):
    settings = {"rl__max_staleness": 1, "run__checkpoint_every": 2}
    run("on", run__steps=2, **settings)
    capfd.readouterr()
    lines, _ = run("on", run__steps=4, **settings)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert ("those of the resumed run are generated again" in capfd.readouterr().out) == (world.rank == 0)


@pytest.mark.sizes(2)
@pytest.mark.parametrize(
    ("name", "replacement", "words"),
    [
        (
            "free_bytes",
            lambda world, device: (2_000_000, 2),
            "completions in progress may need up to 2.6 MiB .* 1.0 MiB",
        ),
        ("decodes_batches", lambda module: False, "expected 0 with a model of the family qwen2"),
    ],
)
def test_what_cannot_be_carried_is_refused_before_the_first_step(run, monkeypatch, name, replacement, words):
    monkeypatch.setattr(carried, name, replacement)
    # 512 rows of 14 tokens with 384 bytes each: 3 layers of 2 heads of 8 keys and values.
    settings = {"rl__max_concurrent_sequences": 512, "data__minibatch_sequences": 1024}
    with pytest.raises(AllRanksUserError, match=f"rl.max_staleness: {words}"):
        run("refused", rl__max_staleness=1, **settings, **only_reward(run.path, "ends_early"))

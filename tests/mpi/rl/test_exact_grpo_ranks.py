"""An exact run that trains on rewards has the bits of one rank, whichever ranks generate and train a prompt group."""

import random
import time

import pytest
from exact_runs import ExactRuns
from grpo_job import make_settings

from odc_mpi.training.recipes.grpo.objective import GRPOObjective
from odc_mpi.training.recipes.grpo.source import RolloutSource

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]

STEPS = 3


@pytest.fixture
def exact(world, grpo_dir, base):
    def configured(folder, changes):
        usual = {
            "run.steps": STEPS,
            "run.dir": folder,
            "run.exact": "true",
            "run.trace_steps": 0,
            "optim.optimizer": "adamw",
            "optim.adam_epsilon": 1e-8,
            "optim.learning_rate": 3e-3,
        }
        return make_settings(grpo_dir, **(usual | changes))

    return ExactRuns(world, base, configured)


@pytest.mark.parametrize(
    "settings",
    [
        {"rl__loss_type": "dapo", "run__eval_every": 2},
        {"rl__loss_type": "grpo", "rl__beta": 0.1, "rl__scale_rewards": "none"},
        {"rl__loss_type": "dr_grpo", "rl__mask_truncated_completions": "true", "model__param_dtype": "bfloat16"},
        {"rl__loss_type": "dapo", "lora__r": 4, "rl__beta": 0.1},
    ],
    ids=["dapo", "grpo", "dr_grpo", "lora"],
)
def test_the_bits_are_those_of_one_rank(world, exact, grpo_dir, settings):
    if "run__eval_every" in settings:
        settings = settings | {"data__eval_path": grpo_dir / "prompts.jsonl", "data__eval_sequences": 5}
    digest, lines = exact.train("all", world, **settings)
    assert (digest, lines) == exact.alone(**settings)
    assert {"loss", "reward", "entropy", "grad_norm", "num_tokens"} <= lines[1].keys()
    assert ("eval_reward" in lines[1]) == ("run__eval_every" in settings)
    assert len({line["loss"] for line in lines}) == STEPS  # and not all 0


@pytest.mark.parametrize(
    "way",
    [
        {"rl__store_bytes": 0, "comm__reduction": "mailbox", "comm__prefetch": 0},
        {"rl__store_bytes": 700, "comm__zero_copy": "off", "comm__prefetch": 2, "comm__gradient_cache_bytes": 0},
    ],
    ids=["store_of_0", "store_of_700"],
)
def test_slow_ranks_change_no_bit(world, exact, monkeypatch, way):
    wanted = exact.alone(rl__loss_type="dapo")
    on_microbatch_end, generate, draws = (
        GRPOObjective.on_microbatch_end,
        RolloutSource._generate,
        random.Random(world.rank),
    )

    def late(self, result):
        time.sleep(draws.choice([0, 0.002, 0.02]))
        on_microbatch_end(self, result)

    def late_to_generate(self, *arguments):
        time.sleep(draws.choice([0, 0.01, 0.05]))
        return generate(self, *arguments)

    monkeypatch.setattr(GRPOObjective, "on_microbatch_end", late)
    monkeypatch.setattr(RolloutSource, "_generate", late_to_generate)
    assert exact.train("all", world, **way) == wanted


def test_a_run_that_goes_on_alone_has_the_same_bits(world, exact):
    settings = {"rl__loss_type": "dapo", "run__checkpoint_every": 1}
    wanted, wanted_lines = exact.alone(rl__loss_type="dapo")
    _, begin = exact.train("first", world, **settings, run__steps=1)
    resume = exact.base / "first" / "checkpoints" / "step_00000001"
    digest, end = exact.train("second", world.split("self"), **settings, run__resume=resume)
    assert [*begin, *end] == wanted_lines
    assert digest == wanted

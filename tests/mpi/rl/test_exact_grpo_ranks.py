"""An exact run that trains on rewards has the bits of one rank, whichever ranks generate and train a prompt group."""

import json
import random
import time

import pytest
from grpo_job import make_settings

from odc_mpi.checkpoint.commands import digest_line
from odc_mpi.errors import AllRanksUserError
from odc_mpi.training import run as runs
from odc_mpi.training.objectives.grpo import GRPOObjective
from odc_mpi.training.rl.source import RolloutSource

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]

STEPS = 3
#: Metrics that depend on time, or on who did what.
OF_RANKS = (
    "bytes",
    "peak_",
    "tokens_per_s",
    "groups_generated",
    "groups_trained",
    "groups_claimed",
    "groups_not_stored",
    "microbatches",
    "slowest",
    "idle",
)
#: Runs on one rank, by what they depend on.
_references = {}


@pytest.fixture
def train(world, grpo_dir, base):
    """`train(name, world, **settings)` runs exactly; returns the digest and the metrics of its steps.

    With a world of one rank, rank 0 runs and the others wait.
    """

    def start(name, among, **changes):
        folder = base / name
        usual = {
            "run__steps": STEPS,
            "run__dir": folder,
            "run__exact": "true",
            "run__trace_steps": 0,
            "optim__optimizer": "adamw",
            "optim__adam_epsilon": 1e-8,
            "optim__learning_rate": 3e-3,
        }
        found = None
        if among is world or world.rank == 0:
            summary = runs.train(make_settings(grpo_dir, **(usual | changes)), among)
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            found = summary["parameters_digest"], [without_times(line) for line in lines]
        return world.gather_objects(found)[0]

    start.base = base
    return start


def without_times(line):
    """The metrics of a step that have nothing to do with time or ranks."""
    return {
        name: value
        for name, value in line.items()
        if not name.startswith(OF_RANKS) and not name.endswith("_s") and name != "time"
    }


def reference(train, world, **changes):
    """The run on a rank by itself."""
    key = repr(sorted(changes.items()))
    if key not in _references:
        _references[key] = train("alone", world.split("self"), **changes)
    return _references[key]


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
def test_the_bits_are_those_of_one_rank(world, train, grpo_dir, settings):
    if "run__eval_every" in settings:
        settings = settings | {"data__eval_path": grpo_dir / "prompts.jsonl", "data__eval_sequences": 5}
    digest, lines = train("all", world, **settings)
    wanted, wanted_lines = reference(train, world, **settings)
    assert lines == wanted_lines
    assert digest == wanted
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
def test_slow_ranks_change_no_bit(world, train, monkeypatch, way):
    wanted, wanted_lines = reference(train, world, rl__loss_type="dapo")
    after_microbatch, generate, draws = (
        GRPOObjective.on_microbatch_end,
        RolloutSource._generate,
        random.Random(world.rank),
    )

    def late(self, result):
        time.sleep(draws.choice([0, 0.002, 0.02]))
        after_microbatch(self, result)

    def late_to_generate(self, *arguments):
        time.sleep(draws.choice([0, 0.01, 0.05]))
        return generate(self, *arguments)

    monkeypatch.setattr(GRPOObjective, "on_microbatch_end", late)
    monkeypatch.setattr(RolloutSource, "_generate", late_to_generate)
    digest, lines = train("all", world, **way)
    assert lines == wanted_lines
    assert digest == wanted


@pytest.mark.sizes(3)
def test_a_run_that_goes_on_twice_on_other_numbers_of_ranks(world, train):
    settings = {"rl__loss_type": "dapo", "run__checkpoint_every": 1}
    wanted, wanted_lines = reference(train, world, **settings)
    base = train.base
    _, first = train("first", world, **settings, run__steps=1)
    _, second = train(
        "second", world.split("self"), **settings, run__steps=2, run__resume=base / "first/checkpoints/step_00000001"
    )
    newest = base / "second/checkpoints/step_00000002"
    digest, third = train("third", world, **settings, run__resume=newest)
    assert [line["step"] for line in (*first, *second, *third)] == [1, 2, 3]
    assert [*first, *second, *third] == wanted_lines
    assert digest == wanted == digest_line(base / "third").split()[0]


def test_what_breaks_it_is_refused(world, train):
    with pytest.raises(AllRanksUserError, match=r"^rl.skip_failed_rewards: expected .* with run.exact, got true: "):
        train("refused", world, rl__skip_failed_rewards="true")

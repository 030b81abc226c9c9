"""Training on preferences by commands: a rank killed before and during training, another number of ranks, an export."""

import json
import re

import pytest
import yaml
from mpi_launch import finish, kill_a_rank_when, odc_mpi, start
from pair_files import write_pairs
from small_run import write_config
from transformers import AutoModelForCausalLM

from odc_mpi.training.recipes.dpo.reference import BLOCK, FILE

#: Several blocks of reference log-probabilities.
NUM_PAIRS = 3 * BLOCK + 5
#: More than a run takes until it is killed.
NUM_STEPS = 120


@pytest.fixture
def pairs_config(tmp_path):
    write_pairs(tmp_path / "pairs.h5", [(1 + i % 3, 2, 1 + i % 2) for i in range(NUM_PAIRS)], vocab_size=60)
    path = write_config(tmp_path / "pairs.h5", tmp_path)
    settings = yaml.safe_load(path.read_text())
    settings["run"] |= {"objective": "dpo", "checkpoint_every": 2}
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.timeout(400)
def test_a_run_killed_before_and_during_training_resumes(pairs_config, tmp_path):
    run = tmp_path / "run"

    def train(ranks, *arguments):
        return start(ranks, "-m", "odc_mpi", "train", "--config", pairs_config, *arguments)

    def has_checkpoint():
        return any(run.glob("checkpoints/step_*"))

    killed = kill_a_rank_when(train(2, "--run.steps", 100_000), (run / FILE).exists)
    assert killed.code not in (0, 2) and not (run / "checkpoints").exists()
    # The second start computes the pairs that are missing, and is killed while it trains.
    killed = kill_a_rank_when(train(3, "--run.steps", 100_000), has_checkpoint)
    computed = int(re.search(r"reference log-probabilities of ([\d,]+) pairs", killed.out)[1].replace(",", ""))
    assert 0 < computed <= NUM_PAIRS - BLOCK
    done = finish(train(2, "--run.steps", NUM_STEPS))
    assert done.code == 0 and "resuming from step" in done.out and "reference log-probabilities" not in done.out
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert odc_mpi(0, "export", run, "--out", tmp_path / "model").code == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.model_type == "qwen2"

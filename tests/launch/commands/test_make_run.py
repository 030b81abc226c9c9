"""`make run` with a user's model: the recipe as it is, with a tiny model in place of SmolLM2."""

import json
import os
import re
import subprocess
import sys

import pytest
from mpi_launch import MPIEXEC, ROOT, environment
from small_run import write_model

from odc_mpi.cli.main import main


@pytest.fixture
def model(tmp_path):
    """A directory with random weights, and a tokenizer of which a function has few tokens."""
    texts = [path.read_text() for path in sorted((ROOT / "odc_mpi" / "shard").glob("*.py"))]
    (tmp_path / "code.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = tmp_path / "code.h5"
    assert main(["prepare", str(tmp_path / "code.jsonl"), "--out", str(data), "--vocab-size", "2000"]) == 0
    return write_model(data, tmp_path / "tiny", vocab_size=2048, max_position_embeddings=2048)


def make(tmp_path, *variables, targets=("run",), **changes):
    """Run make in a directory of its own. Without `READY`, make takes the environment as it is."""
    for name in ("Makefile", "constraints.txt", "jobs"):
        (tmp_path / name).symlink_to(ROOT / name)
    words = ["make", *targets, f"VENV={sys.prefix}", "READY=", f"MPIEXEC={MPIEXEC}", *variables]
    # Not as a part of the make that runs the tests.
    env = {
        name: value
        for name, value in environment(**changes).items()
        if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_make_run_without_a_connection_trains_the_small_model(tmp_path):
    out = make(tmp_path, "MAKE=echo make", PIP_NO_INDEX=1)
    assert out.endswith("== Without SmolLM2: make run-scratch\nmake --no-print-directory run-scratch\n")


@pytest.mark.timeout(400)
def test_make_run_describes_functions_before_and_after_training(model, tmp_path):
    out = make(tmp_path, f"MODEL={model}")
    assert f"== Model: {model}\n" in out
    run = tmp_path / "runs" / "docstrings" / "tiny"
    before, after = out.split("== Training")
    for part in (before.partition("== Descriptions")[2], after.partition("== The three descriptions")[2]):
        # What a model of random weights answers does not matter: its first token may end the answer.
        assert re.findall(r"\[(\d) of 3\]\n", part) == ["1", "2", "3"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 24 and summary["eval_loss"] < summary["eval_loss_start"]
    assert (run.with_name("tiny.adapters") / "adapter_config.json").exists() and (run / "report.html").exists()


@pytest.mark.skipif(os.environ.get("ODC_MPI_LONG") != "1", reason="takes a minute and a half: make soak")
@pytest.mark.timeout(400)
def test_make_run_dpo_and_run_rl_with_two_steps(tmp_path):
    few = tmp_path / "few"
    few.write_text(f'#!/bin/sh\nexec {MPIEXEC} "$@" --run.steps 2\n')
    few.chmod(0o755)
    out = make(tmp_path, f"MPIEXEC={few}", targets=("run-dpo", "run-rl"))
    assert out.count("[2 of 2]") == 2, "two numbers are sorted before the training and after"
    for name in ("sft", "dpo", "grpo"):
        assert json.loads((tmp_path / "runs" / "digits" / name / "summary.json").read_text())["steps"] == 2

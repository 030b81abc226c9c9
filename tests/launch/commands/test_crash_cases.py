"""Checkpoints with real commands: killed and stopped runs, a directory in use, full disks."""

import json
import os
import re
import signal
import time
from contextlib import suppress

import pytest
import yaml
from crash_cases import CONSTANT, ENDLESS, CrashedRun, Start, small_disk
from mpi_launch import finish, odc_mpi, start
from pair_files import write_pairs
from small_run import losses, write_config
from transformers import AutoModelForCausalLM

from odc_mpi.checkpoint.commands import verify
from odc_mpi.cli.main import main
from odc_mpi.training.recipes.dpo.reference import BLOCK

#: Several blocks of reference log-probabilities.
NUM_PAIRS = 3 * BLOCK + 5
#: Steps of a run after its last crash.
STEPS_LEFT = 10
#: By the kind of checkpoint: the starts of a run. The last one of pairs goes on to the end.
CASES = {
    "full": (Start(3, "step 5"), Start(2, "resuming"), Start(2, "step 5")),
    # The second start computes the pairs that are missing, and is killed while it trains.
    "dpo": (Start(2, "references"), Start(3, "checkpoint")),
}


def pairs_config(directory):
    write_pairs(directory / "pairs.h5", [(1 + i % 3, 2, 1 + i % 2) for i in range(NUM_PAIRS)], vocab_size=60)
    path = write_config(directory / "pairs.h5", directory)
    settings = yaml.safe_load(path.read_text())
    settings["run"] |= {"objective": "dpo"}
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.quick
@pytest.mark.timeout(240)
def test_a_warning_of_the_scheduler_saves_and_nobody_else_writes(config, capsys):
    """An interrupt saves, too: test_start_and_end.py."""
    run = CrashedRun(config)
    job = run.begin(2)
    run.come_to(job, "step 3", 2)
    assert main(["train", "--config", str(config), "--run.checkpoint_every", "1", "--run.resume", "never"]) == 2
    assert capsys.readouterr().err.count("is in use by another run") == 1
    run.happen(job, "SIGUSR1")
    assert run.seen >= 3 and json.loads((run.directory / "summary.json").read_text())["steps"] == run.seen
    assert [path.name for path in (run.directory / "checkpoints").iterdir()] == [f"step_{run.seen:08d}"]
    assert not list(run.directory.glob("earlier-*")) and not (run.directory / "owner.json").exists()
    assert verify(run.directory)[1] == 0


@pytest.mark.timeout(400)
def test_crashes(config):
    CrashedRun(config, every=2).endure(CASES["full"])


@pytest.mark.timeout(400)
def test_crashes_before_and_during_training_on_preferences(tmp_path):
    run = CrashedRun(pairs_config(tmp_path), every=2)
    run.endure(CASES["dpo"])
    (_, without), (second, _) = run.ends
    assert without == 0, "it was killed before it had a checkpoint"
    computed = int(re.search(r"reference log-probabilities of ([\d,]+) pairs", second.out)[1].replace(",", ""))
    assert 0 < computed <= NUM_PAIRS - BLOCK
    done = finish(run.begin(2, "--run.steps", run.seen + STEPS_LEFT))
    assert done.code == 0 and "resuming from step" in done.out and "reference log-probabilities" not in done.out
    assert len(losses(run.directory)) == run.seen + STEPS_LEFT
    assert odc_mpi(0, "export", run.directory, "--out", tmp_path / "model").code == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.model_type == "qwen2"


#: A save that takes longer than anybody wants to wait.
SLOW_SAVE = """
import sys, time
from odc_mpi.training.rundir.checkpointing import CheckpointCallback
def on_step_end(self, step):
    if self._stop.requested_on_any_rank:
        print('saving', flush=True)
        time.sleep(80)
CheckpointCallback.on_step_end = on_step_end
from odc_mpi.cli import main as cli
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_second_signal_does_not_wait(config, ranks):
    job = start(ranks, "-c", SLOW_SAVE, "train", "--config", config, "--run.steps", ENDLESS, *CONSTANT)
    job.wait_for(f" 2/{ENDLESS}")
    job.send_signal(signal.SIGINT)  # Ctrl-C
    time.sleep(0.2)  # MPICH's mpiexec can hang if it gets two signals at the same time
    job.send_signal(signal.SIGUSR1)  # the same again, as by way of a launcher
    job.wait_for("\n saving\n")
    time.sleep(1.2)
    job.send_signal(signal.SIGINT)
    done = finish(job)
    # MPICH's mpiexec has codes of its own: 255, or 0 if a proxy ends before it.
    assert done.code in ((0, 255) if ranks else (-signal.SIGINT,)) and done.seconds < 10
    assert "interrupted; saving after this step. Press Ctrl-C again" in done.err


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_disk_that_is_full_for_a_while(config):
    run = CrashedRun(config, every=25)
    ballast = run.directory / "ballast"
    with small_disk(run.directory, "4m"):
        # The disk fills up while no checkpoint is being written: one that fails gives its space back, to metrics.jsonl.
        job = run.begin(0, "--run.keep_checkpoints", 1)
        job.wait_for(f" 5/{ENDLESS}")
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        job.wait_for(f" 40/{ENDLESS}")
        ballast.unlink()
        job.wait_for(f" 44/{ENDLESS}")
        job.send_signal(signal.SIGTERM)
        done = finish(job)
        assert done.code == 75, (done.out, done.err)
        assert "Traceback" not in done.err and "No space left on device" in done.err
        assert "not saved: " in done.err
        assert done.err.count("metrics.jsonl: No space left on device") == 1
        steps = [json.loads(line)["step"] for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
        assert steps[:5] == [1, 2, 3, 4, 5] and steps == sorted(set(steps)) and steps[-1] >= 44
        assert [path.name for path in (run.directory / "checkpoints").iterdir()] == [f"step_{steps[-1]:08d}"]
        assert verify(run.directory)[1] == 0

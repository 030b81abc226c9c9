"""Checkpoints with real commands: killed and stopped runs, full disks."""

import json
import os
import random
import signal
import subprocess
import time
from contextlib import contextmanager, suppress

import pytest
from mpi_launch import end_all, finish, kill_a_rank_when, odc_mpi, start
from processes import descendants, is_running
from small_run import last_step, losses

from odc_mpi.checkpoint.commands import verify
from odc_mpi.checkpoint.manifest import steps_in

CONSTANT = ("--optim.lr_scheduler_type", "constant")


def run_until(step, ranks, config, *arguments):
    """Start a run without end, and return when it has done a step."""
    process = start(ranks, "-m", "odc_mpi", "train", "--config", config, "--run.steps", 100000, *CONSTANT, *arguments)
    wait_for(process, f" {step}/100000")
    return process


def wait_for(process, words):
    for line in process.stdout:
        if words in f" {line}":
            return
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize("number", [pytest.param(signal.SIGUSR1, marks=pytest.mark.quick), signal.SIGINT])
def test_a_warning_of_the_scheduler_and_an_interrupt_save(config, tmp_path, number):
    process = run_until(3, 3, config)
    process.send_signal(number)  # which MPICH's mpiexec passes on to its ranks
    done = finish(process)
    assert done.code == 75, (done.out, done.err)
    assert "stopped on request after step" in done.err
    step = len(losses(tmp_path / "run"))
    assert step >= 3 and json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == step
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{step:08d}"]


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_second_signal_does_not_wait(config, tmp_path, ranks):
    script = tmp_path / "script.py"
    # A save that takes longer than anybody wants to wait.
    script.write_text(
        "import sys, time\n"
        "from odc_mpi.training.rundir.checkpointing import CheckpointCallback\n"
        "def on_step_end(self, step):\n"
        "    if self._stop.requested_on_any_rank:\n"
        "        print('saving', flush=True)\n"
        "        time.sleep(80)\n"
        "CheckpointCallback.on_step_end = on_step_end\n"
        "from odc_mpi.cli import main as cli\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    process = start(ranks, script, "train", "--config", config, "--run.steps", 100000, *CONSTANT)
    wait_for(process, " 2/100000")
    process.send_signal(signal.SIGINT)  # Ctrl-C
    time.sleep(0.2)  # MPICH's mpiexec can hang if it gets two signals at the same time
    process.send_signal(signal.SIGUSR1)  # the same again, as by way of a launcher
    wait_for(process, "saving")
    time.sleep(1.2)
    started = [process.pid, *descendants(process.pid)]
    process.send_signal(signal.SIGINT)
    done = finish(process)
    # MPICH's mpiexec has codes of its own: 255, or 0 if a proxy ends before it.
    assert done.code in ((0, 255) if ranks else (-signal.SIGINT,)) and done.seconds < 10
    deadline = time.monotonic() + 10
    while alive := [pid for pid in started if is_running(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)
    assert "interrupted; saving after this step. Press Ctrl-C again" in done.err


def test_two_runs_in_one_directory(config, tmp_path):
    first = run_until(3, 0, config, "--run.checkpoint_every", 2)
    second = odc_mpi(2, "train", "--config", config, "--run.checkpoint_every", 1, "--run.resume", "never")
    assert second.code == 2 and "Traceback" not in second.err
    assert second.err.count("is in use by another run") == 1
    first.send_signal(signal.SIGTERM)
    assert finish(first).code == 75
    assert not list((tmp_path / "run").glob("earlier-*")) and not (tmp_path / "run" / "owner.json").exists()
    assert verify(tmp_path / "run")[1] == 0


@contextmanager
def small_disk(path, size):
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path]).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        end_all()
        subprocess.run(["umount", path], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_disk_that_is_full_for_a_while(config, tmp_path):
    run, ballast = tmp_path / "run", tmp_path / "run" / "ballast"
    with small_disk(run, "4m"):
        # The disk fills up while no checkpoint is being written: one that fails gives its space back, to metrics.jsonl.
        process = run_until(5, 0, config, "--run.checkpoint_every", 25, "--run.keep_checkpoints", 1)
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        wait_for(process, " 40/100000")
        ballast.unlink()
        wait_for(process, " 44/100000")
        process.send_signal(signal.SIGUSR1)
        done = finish(process)
        assert done.code == 75, (done.out, done.err)
        assert "Traceback" not in done.err and "No space left on device" in done.err
        assert "not saved: " in done.err
        assert done.err.count("metrics.jsonl: No space left on device") == 1
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert steps[:5] == [1, 2, 3, 4, 5] and steps == sorted(set(steps)) and steps[-1] >= 44
        assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{steps[-1]:08d}"]
        assert verify(run)[1] == 0


def test_crashes(config, tmp_path):
    """Of a crash, the interval that was being written is lost, and the one after it, as steps are shorter than that.

    The second start is killed while it resumes, or soon after.
    """
    run, every, seen, newest = tmp_path / "run", 2, 0, 0
    for num_ranks, early in ((3, False), (2, True), (2, False)):
        process = start(
            num_ranks,
            *("-m", "odc_mpi", "train", "--config", config, "--run.steps", 100000, *CONSTANT),
            *("--run.checkpoint_every", every),
        )
        due = 0 if early else seen + 5
        if newest:
            wait_for(process, f"resuming from step {newest}:")
        time.sleep(random.uniform(0, 0.5) if early else 0)
        killed = kill_a_rank_when(process, lambda: last_step(run) >= due, num_ranks=num_ranks)  # noqa: B023
        assert killed.code != 0
        before = newest
        seen, newest = last_step(run), max(steps_in(run / "checkpoints"), default=0)
        assert newest >= before
        assert seen - newest <= 2 * every, f"of {seen} steps the checkpoint has {newest}"
    lines, damaged = verify(run)
    assert damaged == 0, lines

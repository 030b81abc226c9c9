"""The lock of a run directory between two runs."""

import json
import os
import subprocess
import sys

import pytest
from user_errors import refused

from odc_mpi.training.rundir.resume import _list_checkpoints
from odc_mpi.training.rundir.run_dir_lock import LOCK_FILE, RunDirectoryLock

TIMEOUT_S = 0.4
#: A run that has the directory until its standard input ends.
HOLD = """
import sys
from pathlib import Path
from odc_mpi.training.rundir.run_dir_lock import RunDirectoryLock
lock = RunDirectoryLock(Path(sys.argv[1]), 0)
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def another(tmp_path):
    """A process that has `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "taken\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def no_slurm(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)


def left_by(run_dir, **changes):
    """The file of a run that was killed, or of one on another host."""
    with RunDirectoryLock(run_dir, 0):
        record = json.loads((run_dir / LOCK_FILE).read_text())
    (run_dir / LOCK_FILE).write_text(json.dumps(record | changes))


def test_it_is_gone_when_the_run_is(tmp_path):
    for _ in range(2):
        with RunDirectoryLock(tmp_path / "run", TIMEOUT_S) as lock:
            assert json.loads((tmp_path / "run" / LOCK_FILE).read_text())["pid"] == os.getpid()
            lock.require_held()
        assert list((tmp_path / "run").iterdir()) == []


def test_a_run_that_is_alive_is_left_alone(tmp_path, another):
    before = (tmp_path / LOCK_FILE).read_text()
    (tmp_path / "link").symlink_to(tmp_path)
    for path in (tmp_path, tmp_path / "link"):
        refused(f"in use by another run (process {another.pid} on", RunDirectoryLock, path, TIMEOUT_S)
    assert (tmp_path / LOCK_FILE).read_text() == before


def test_a_checkpoint_that_another_run_is_about_to_replace_is_left_alone(tmp_path, another):
    hidden = tmp_path / "checkpoints" / ".retired_step_00000004.17"
    hidden.mkdir(parents=True)
    (hidden / "manifest.json").write_text("{}")
    refused("in use by another run", _list_checkpoints, tmp_path, TIMEOUT_S)
    assert hidden.exists()
    another.kill()
    assert _list_checkpoints(tmp_path, 60) == [(tmp_path / "checkpoints" / "step_00000004",)]
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_run_that_was_killed_is_no_obstacle(tmp_path, another, capfd):
    another.kill()  # and not waited for: a zombie
    with RunDirectoryLock(tmp_path, 60) as lock:
        lock.require_held()
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("no_slurm")
@pytest.mark.parametrize(
    ("theirs", "ours", "warns"), [(None, None, True), ("7", "8", True), ("7", None, True), ("7", "7", False)]
)
def test_a_run_on_another_host(tmp_path, monkeypatch, capsys, theirs, ours, warns):
    """It may be alive, unless it is this job, which was put into the queue again."""
    left_by(tmp_path, host="elsewhere", **({"slurm_job_id": theirs} if theirs else {}))
    if ours:
        monkeypatch.setenv("SLURM_JOB_ID", ours)
    with RunDirectoryLock(tmp_path, TIMEOUT_S) as lock:
        lock.require_held()
    assert ("WARNING" in capsys.readouterr().err) == warns


def test_whose_directory_was_taken_stops(tmp_path):
    with RunDirectoryLock(tmp_path, TIMEOUT_S) as lock:
        (tmp_path / LOCK_FILE).write_text(json.dumps({"token": "another", "host": "elsewhere"}))
        refused("another run has taken over", lock.require_held, error=OSError)
    assert (tmp_path / LOCK_FILE).exists(), "it is the other's"
    (tmp_path / LOCK_FILE).write_text("half a li")
    RunDirectoryLock(tmp_path, TIMEOUT_S).__exit__()


def test_a_directory_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "run" / LOCK_FILE).mkdir(parents=True)
    for path in (tmp_path / "file" / "run", *[tmp_path / "run"] * 2):
        refused("run.dir: expected a directory to write in", RunDirectoryLock, path, TIMEOUT_S)

"""Which of two runs may write in a directory."""

import errno
import json
import multiprocessing
import os
import subprocess
import sys

import pytest

from odc_mpi.errors import UserError
from odc_mpi.train.rundir import owner as module
from odc_mpi.train.rundir.owner import NAME, Owner, take
from odc_mpi.train.rundir.resume import _own_checkpoints

TIMEOUT_S = 0.4


@pytest.fixture
def another():
    """A process that goes on."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def no_slurm(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)


def left_by(run_dir, **changes):
    """The file of a run that was killed, or of one that goes on."""
    with Owner(run_dir, 0):
        record = json.loads((run_dir / NAME).read_text())
    (run_dir / NAME).write_text(json.dumps(record | changes))


def test_it_is_gone_when_the_run_is(tmp_path):
    with take(tmp_path / "run", TIMEOUT_S) as owner:
        assert json.loads((tmp_path / "run" / NAME).read_text())["pid"] == os.getpid()
        owner.require()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_run_that_is_alive_is_left_alone(tmp_path, another):
    left_by(tmp_path, pid=another.pid, started=module._start_of(another.pid))
    before = (tmp_path / NAME).read_text()
    with pytest.raises(UserError, match=rf"no other run writes, got .*, where another run \(process {another.pid} on"):
        take(tmp_path, TIMEOUT_S)
    assert (tmp_path / NAME).read_text() == before


def test_a_checkpoint_that_another_run_is_about_to_replace_is_left_alone(tmp_path, another):
    hidden = tmp_path / "checkpoints" / ".retired_step_00000004.17"
    hidden.mkdir(parents=True)
    (hidden / "manifest.json").write_text("{}")
    left_by(tmp_path, pid=another.pid, started=module._start_of(another.pid))
    with pytest.raises(UserError, match="no other run writes"):
        _own_checkpoints(tmp_path, 0, TIMEOUT_S)
    assert hidden.exists()
    (tmp_path / NAME).unlink()
    assert _own_checkpoints(tmp_path, 0, TIMEOUT_S) == [tmp_path / "checkpoints" / "step_00000004"]
    assert not (tmp_path / NAME).exists()


def test_a_run_that_was_killed_is_no_obstacle(tmp_path, another, capfd):
    number, started = another.pid, module._start_of(another.pid)
    another.kill()  # and not waited for: a zombie
    left_by(tmp_path, pid=number, started=started)
    take(tmp_path, TIMEOUT_S).__exit__()
    another.wait()
    left_by(tmp_path, pid=number, started=started)
    take(tmp_path, TIMEOUT_S).__exit__()
    assert capfd.readouterr().err == ""


def test_another_process_that_got_its_number(tmp_path, another):
    left_by(tmp_path, pid=another.pid, started="before this boot/17")
    take(tmp_path, TIMEOUT_S).__exit__()


def test_a_run_that_is_just_ending_is_waited_for(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"]) as ending:
        left_by(tmp_path, pid=ending.pid, started=module._start_of(ending.pid))
        take(tmp_path, 60).__exit__()


@pytest.mark.usefixtures("no_slurm")
@pytest.mark.parametrize(
    ("theirs", "ours", "warns"), [(None, None, True), ("7", "8", True), ("7", None, True), ("7", "7", False)]
)
def test_a_run_on_another_host(tmp_path, monkeypatch, capsys, theirs, ours, warns):
    """It may be alive, unless it is this job, which was put into the queue again."""
    left_by(tmp_path, host="elsewhere", **({"slurm_job_id": theirs} if theirs else {}))
    if ours:
        monkeypatch.setenv("SLURM_JOB_ID", ours)
    with take(tmp_path, TIMEOUT_S) as owner:
        owner.require()
    assert ("WARNING" in capsys.readouterr().err) == warns


def test_whose_directory_was_taken_stops(tmp_path):
    with take(tmp_path, TIMEOUT_S) as owner:
        left_by(tmp_path, token="another")
        with pytest.raises(OSError, match="another run has taken over"):
            owner.require()
    assert (tmp_path / NAME).exists(), "it is the other's"
    (tmp_path / NAME).write_text("half a li")
    take(tmp_path, TIMEOUT_S).__exit__()


def test_a_directory_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^run\.dir: expected a directory to write in"):
        take(tmp_path / "file" / "run", TIMEOUT_S)


def start_at_once(run_dirs, meet, results):
    """Take one directory after the other, each at the same moment as another process."""
    for run_dir in run_dirs:
        meet.wait()
        try:
            owner = Owner(run_dir, 0)
        except UserError as error:
            results.put((run_dir, str(error)))
            owner = None
        meet.wait()
        if owner:
            owner.require()
            results.put((run_dir, "taken"))
        meet.wait()
        if owner:
            owner.__exit__()


def test_of_two_starts_at_the_same_moment_one_is_refused(tmp_path):
    """Whether the directory is new, or a killed run has left its file there."""
    run_dirs = [tmp_path / f"run{number}" for number in range(60)]
    for run_dir in run_dirs[::2]:
        left_by(run_dir, pid=1 << 30, started="before this boot/17")
    context = multiprocessing.get_context("fork")
    meet, results = context.Barrier(2), context.Queue()
    starts = [context.Process(target=start_at_once, args=(run_dirs, meet, results)) for _ in range(2)]
    for start in starts:
        start.start()
    outcomes = {run_dir: [] for run_dir in run_dirs}
    try:
        for _ in range(2 * len(run_dirs)):
            run_dir, outcome = results.get(timeout=20)
            outcomes[run_dir].append(outcome)
    except BaseException:
        meet.abort()
        raise
    finally:
        for start in starts:
            start.join()
    for told in outcomes.values():
        refused, taken = sorted(told)
        assert taken == "taken" and "where another run (process" in refused, told
    assert not [path for run_dir in run_dirs for path in run_dir.iterdir()]


@pytest.mark.parametrize("reason", [errno.EPERM, errno.ENOTSUP])
def test_a_file_system_without_hard_links(tmp_path, monkeypatch, another, reason):
    def refuse(*_):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "link", refuse)
    with take(tmp_path, TIMEOUT_S) as owner:
        owner.require()
    assert not list(tmp_path.iterdir())
    left_by(tmp_path, pid=another.pid, started=module._start_of(another.pid))
    with pytest.raises(UserError, match=f"process {another.pid} on"):
        take(tmp_path, TIMEOUT_S)

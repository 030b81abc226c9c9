"""The launcher over a false mpiexec: a script that says what it was given, or does not want to end."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from processes import is_running

from odc_mpi.cli import main as cli
from odc_mpi.cli import mpiexec as launch
from odc_mpi.errors import UserError

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable  # tests change it for the launcher


@pytest.fixture
def mpiexec(tmp_path, monkeypatch):
    """Return a function that installs a shell script as the only mpiexec."""
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")

    def install(script, folder="path"):
        path = tmp_path / folder / "mpiexec"
        path.parent.mkdir()
        path.write_text("#!/bin/sh\n" + textwrap.dedent(script))
        path.chmod(0o755)
        return str(path)

    return install


def test_the_mpiexec_beside_python_comes_first(mpiexec):
    mpiexec("")
    beside = mpiexec("", folder="bin")
    assert launch.mpiexec() == beside


def test_no_mpiexec(mpiexec, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="no mpiexec beside"):
        launch.mpiexec()


def test_more_ranks_than_a_node_bears_are_not_started(mpiexec):
    mpiexec("echo started >&2; exit 9")
    with pytest.raises(UserError, match=r"--ranks 100000: expected at most \d+ on"):
        launch.run(100_000, ["bench", "transport"], timeout_s=10)


def test_open_mpi_may_run_as_root_and_with_more_ranks_than_cores(mpiexec, monkeypatch, capfd):
    mpiexec("env")
    monkeypatch.setenv("OMPI_MCA_osc", "rdma")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_MCA_rmaps_default_mapping_policy"):
        monkeypatch.delenv(name, raising=False)
    assert launch.run(2, [], timeout_s=20) == 0
    settings = set(capfd.readouterr().out.splitlines())
    assert {"OMPI_ALLOW_RUN_AS_ROOT=1", "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe"} <= settings
    assert "OMPI_MCA_osc=rdma" in settings, "the user's own setting wins"


@pytest.mark.parametrize(("ending", "code"), [("exit 0", 0), ("exit 2", 2), ("exit 75", 75), ("kill -KILL $$", 137)])
def test_exit_codes_pass_through(mpiexec, ending, code):
    mpiexec(ending)
    assert launch.run(2, [], timeout_s=20) == code


def test_beyond_its_time_everything_is_ended(mpiexec, tmp_path):
    mpiexec(f"echo $$ > {tmp_path}/pid; exec sleep 60")
    with pytest.raises(TimeoutError, match="2 ranks did not end within"):
        launch.run(2, [], timeout_s=0.5)
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_what_does_not_want_to_end_is_killed(mpiexec, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", 0.5)
    mpiexec(f"trap '' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 0.1; done")
    with pytest.raises(TimeoutError):
        launch.run(2, [], timeout_s=0.5)
    assert not is_running(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_mpiexec(mpiexec, tmp_path, number):
    mpiexec(f"trap 'touch {tmp_path}/asked; exit 1' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 0.1; done")
    program = (
        f"import sys; sys.executable = {launch.sys.executable!r}\n"
        "from odc_mpi.cli import mpiexec as launch; launch.run(2, [], timeout_s=60)"
    )
    process = subprocess.Popen(
        [PYTHON, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
    )
    try:
        until((tmp_path / "pid").exists)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in err
    assert (tmp_path / "asked").exists()
    assert not is_running(int((tmp_path / "pid").read_text()))


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_interrupt_while_mpiexec_starts_ends_it(mpiexec, tmp_path, monkeypatch):
    mpiexec(f"echo $$ > {tmp_path}/pid; while :; do sleep 0.1; done")
    popen = subprocess.Popen

    def interrupted(*arguments, **options):
        process = popen(*arguments, **options)
        until((tmp_path / "pid").exists)
        signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(launch.subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch.run(2, [], timeout_s=60)
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_ranks_that_take_too_long(monkeypatch, capsys):
    def late(*_, **__):
        raise TimeoutError("2 ranks did not end within 1 s: raise --timeout-s")

    monkeypatch.setattr(launch, "run", late)
    assert cli.main(["bench", "transport"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1] == "odc-mpi: error: 2 ranks did not end within 1 s: raise --timeout-s"

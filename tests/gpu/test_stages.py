"""Stages go on after what fails in them; commands stand in for launches on a GPU."""

import json
import sys
import time

import pytest
import stages

TESTS = [
    "tests/mpi/device/test_gpu.py::test_a[1-x]",
    "tests/mpi/device/test_gpu.py::test_b",
    "tests/mpi/device/test_gpu.py::test_c",
]


@pytest.fixture
def job(tmp_path):
    return stages.Job("mpich", ("env",), tmp_path, tmp_path / "stage.log", time.monotonic() + 60, {"ODC_MPI_X": "7"})


def test_a_command_is_printed_and_kept(job, capfd):
    code, output = job.call(sys.executable, "-c", "import os; print(os.environ['ODC_MPI_X'], 'out'); os._exit(3)")
    assert (code, output) == (3, "7 out\n")
    assert capfd.readouterr().out == job.log.read_text()
    assert job.log.read_text().startswith("$ ODC_MPI_X=7 ") and job.log.read_text().endswith("7 out\n")


def test_a_command_ends_with_its_stage(tmp_path):
    job = stages.Job("mpich", (), tmp_path, tmp_path / "stage.log", time.monotonic() + 1, {})
    began = time.monotonic()
    assert job.call("sleep", "60")[0] == 124
    assert time.monotonic() - began < 10


class Scripted:
    """Collects the tests above, and ends a launch at the first that is to fail, as mpiexec does."""

    def __init__(self, failing):
        self.until, self._failing, self.launched = time.monotonic() + 60, failing, []

    def call(self, *words):
        return 0, "\n".join(TESTS) + "\n\n3 tests collected\n"

    def launch(self, ranks, *words):
        due = [word for word in words if word in TESTS]
        self.launched.append(due)
        failed = next((test for test in due if test in self._failing), None)
        return (1, f"odc_mpi: rank 0 of {ranks}: {failed} failed in call\n") if failed else (0, "3 passed\n")


@pytest.mark.parametrize(
    ("failing", "launched", "code"),
    [
        ([], [TESTS], 0),
        (TESTS[:1], [TESTS, TESTS[1:]], 1),
        (TESTS[:2], [TESTS, TESTS[1:], TESTS[2:]], 1),
        (TESTS[2:], [TESTS], 1),
    ],
)
def test_the_tests_behind_one_that_fails_are_launched_again(failing, launched, code):
    job = Scripted(failing)
    assert stages.training(job, 2, "chosen") == code
    assert [due for due in job.launched if due] == launched


@pytest.mark.parametrize(("printed", "code", "ended"), [('{"library": "x"}', 1, 0), ("no answer", 0, 1)])
def test_a_doctor_that_answered_has_done_its_work(tmp_path, job, monkeypatch, printed, code, ended):
    program = tmp_path / "odc-mpi"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' '{printed}'\nexit {code}\n")
    program.chmod(0o700)
    monkeypatch.setattr(stages, "ODC_MPI", program)
    monkeypatch.setattr(stages.Job, "launch", lambda job, ranks, *words: job.call(*words))
    assert stages.doctor(job, 2) == ended
    kept = job.log.with_suffix(".json")
    assert kept.exists() == (ended == 0)
    assert ended or json.loads(kept.read_text()) == {"library": "x"}


def test_stages_are_named_and_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stages, "STAGES", {"good": lambda job: 0, "bad": lambda job: 2, "none": lambda job: "no GPU"})
    monkeypatch.setattr(sys, "argv", ["stages.py", "--logs", str(tmp_path)])
    assert stages.main() == 1
    errors = capsys.readouterr().out
    assert "bad                failed: exit code 2" in errors and "none               left out: no GPU" in errors
    monkeypatch.setattr(sys, "argv", ["stages.py", "--logs", str(tmp_path), "good", "none"])
    assert stages.main() == 0
    monkeypatch.setattr(sys, "argv", ["stages.py", "nothing"])
    with pytest.raises(SystemExit) as ended:
        stages.main()
    assert ended.value.code == 2 and "no stage nothing: expected some of good, bad, none" in capsys.readouterr().err

"""Failures of the training scripts, with stand-ins for Slurm's programs."""

import os
import signal
import subprocess
import time

import pytest
from batch_scripts import templates

#: Records its arguments; srun and sbcast then do what the variable of their name contains.
PROGRAM = """#!/bin/bash
echo "{name} $*" >> "$CALLS"
case " $* " in *" rm "*) exit 0 ;; esac
eval "${name}"
"""
#: Goes on until SIGUSR1, which it obeys.
UNTIL_SIGNALED = (
    'trap \'touch "$ODC_MPI_STOPPED_FILE"; exit 0\' USR1; touch "$CALLS.up"; for i in {1..300}; do sleep 0.1; done'
)


class Place:
    """A directory with spaces in its name, in which scripts run."""

    def __init__(self, path):
        self.path = path / "my jobs"
        self.path.mkdir()
        self.calls_path = self.path / "calls"
        for name in ("srun", "sbcast", "scontrol"):
            program = self.path / name
            program.write_text(PROGRAM.format(name=name))
            program.chmod(0o755)

    def start(self, script, *arguments, **env):
        path = self.path / "script"
        path.write_text(script)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        variables = {"SLURM_JOB_ID": "12", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "job", "CALLS": str(self.calls_path)}
        variables |= {"srun": "true", "sbcast": "true", "scontrol": "true", "PATH": f"{self.path}:{os.environ['PATH']}"}
        return subprocess.Popen(
            ["bash", path, *arguments], cwd=self.path, env=clean | variables | env, stderr=subprocess.PIPE, text=True
        )

    def run(self, script, *arguments, **env):
        """Return the exit code and the output."""
        process = self.start(script, *arguments, **env)
        _, output = process.communicate(timeout=30)
        return process.returncode, output

    def signal(self, *numbers, **env):
        """Send signals to TRAIN as soon as a stand-in is up; return the exit code."""
        process = self.start(TRAIN, **env)
        deadline = time.monotonic() + 20
        while not (self.path / "calls.up").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for number in numbers:
            process.send_signal(number)
        process.communicate(timeout=30)
        return process.returncode

    def calls(self, name):
        text = self.calls_path.read_text() if self.calls_path.exists() else ""
        return [line.removeprefix(f"{name} ") for line in text.splitlines() if line.startswith(f"{name} ")]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


TEMPLATES = templates()
TRAIN = TEMPLATES["train"]
STAGED = {"STAGE": "/local", "DATA": "data of mine.h5"}
COPYING = 'touch "$CALLS.up"; exec sleep 30'
REMOVED = "rm -f /local/12-data of mine.h5"


@pytest.mark.parametrize(("srun", "code"), [("true", 0), ("exit 7", 7), ("exit 138", 138)])
def test_the_exit_code_is_that_of_the_ranks(place, srun, code):
    assert place.run(TRAIN, "--config", "my file", srun=srun) == (code, "")
    assert place.calls("srun")[0].endswith("odc-mpi train --config my file")
    assert place.calls("scontrol") == []


@pytest.mark.parametrize("srun", ['touch "$ODC_MPI_STOPPED_FILE"', "exit 75"])
def test_a_stopped_job_queues_again(place, srun):
    assert place.run(TRAIN, srun=srun)[0] == 75
    assert place.calls("scontrol") == ["requeue 12"]
    assert not list(place.path.glob(".*stopped"))


def test_ranks_that_start_while_the_job_is_stopped_find_a_file(place):
    deaf = 'trap "" USR1; touch "$CALLS.up"; until [ -e "$ODC_MPI_STOP_FILE" ]; do sleep 0.1; done; exit 75'
    assert place.signal(signal.SIGUSR1, srun=deaf) == 75
    assert place.calls("scontrol") == ["requeue 12"]
    assert not list(place.path.glob(".*stop*"))


@pytest.mark.parametrize("staged", [{}, STAGED])
def test_a_canceled_job_leaves_no_files(place, staged):
    saved = UNTIL_SIGNALED.replace("USR1", "TERM")
    assert place.signal(signal.SIGTERM, srun=f"(sleep 0.2; kill -TERM $$) & {saved}", **staged) == 143
    assert place.calls("scontrol") == []
    assert len(place.calls("srun")) == 1, "the ranks have removed the copies"
    assert not list(place.path.glob(".*stop*"))


def test_ranks_get_the_environment_of_the_script(place):
    assert place.run(TRAIN, srun='[ "$SLURM_EXPORT_ENV" = ALL ]', SLURM_EXPORT_ENV="NONE") == (0, "")


def test_a_number_without_settings_does_not_train(place):
    code, output = place.run(TEMPLATES["sweep"], SLURM_ARRAY_JOB_ID="9", SLURM_ARRAY_TASK_ID="3")
    assert code != 0 and "there is no line of settings for index 3" in output
    assert place.calls("srun") == []


def test_the_ranks_are_notified_once(place):
    assert place.signal(signal.SIGUSR1, signal.SIGUSR1, srun=UNTIL_SIGNALED) == 75
    assert place.calls("scontrol") == ["requeue 12"]


def test_a_signal_while_the_data_set_is_copied(place):
    assert place.signal(signal.SIGUSR1, sbcast=COPYING, **STAGED) == 75
    assert place.calls("scontrol") == ["requeue 12"]
    (call,) = place.calls("srun")
    assert call.endswith(REMOVED), "nothing is trained"


def test_the_copy_is_used_for_training(place):
    srun = '[ "$ODC_MPI_STAGED_FILE" = "/local/12-data of mine.h5" ]'
    assert place.run(TRAIN, "--config", "c", srun=srun, **STAGED) == (0, "")
    assert place.calls("sbcast") == ["--force data of mine.h5 /local/12-data of mine.h5"]
    (call,) = place.calls("srun")
    assert call.endswith("--config c --data.path /local/12-data of mine.h5")


def test_a_run_that_fails_leaves_no_copy(place):
    assert place.run(TRAIN, srun="exit 2", **STAGED)[0] == 2
    assert place.calls("srun")[-1].endswith(REMOVED)


def test_a_copy_that_the_ranks_cannot_remove_is_removed(place):
    data = place.path / "data"
    left = place.path / "12-data"
    assert place.run(TRAIN, sbcast=f"touch '{left}'", STAGE=str(place.path), DATA=str(data)) == (0, "")
    assert not left.exists()
    assert place.calls("srun")[-1].endswith(f"rm -f {left}")


def test_a_job_canceled_while_it_copies_leaves_nothing(place):
    assert place.signal(signal.SIGTERM, sbcast=COPYING, **STAGED) == 143
    assert place.calls("srun")[-1].endswith(REMOVED)
    assert place.calls("scontrol") == []


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        ([], {"STAGE": "/local"}, "STAGE=/local: expected DATA"),
        (["--data.path", "x"], STAGED, "remove --data.path"),
        (["--data.path=x"], STAGED, "remove --data.path"),
    ],
)
def test_user_errors_of_staging(place, arguments, env, words):
    code, output = place.run(TRAIN, *arguments, **env)
    assert code == 2
    assert len(output.splitlines()) == 1 and words in output
    assert place.calls("sbcast") == place.calls("srun") == []

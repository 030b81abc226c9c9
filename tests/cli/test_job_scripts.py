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


DEAF = 'trap "" USR1; touch "$CALLS.up"; until [ -e "$ODC_MPI_STOP_FILE" ]; do sleep 0.1; done; exit 75'
SAVED = f"(sleep 0.2; kill -TERM $$) & {UNTIL_SIGNALED.replace('USR1', 'TERM')}"


@pytest.mark.parametrize(
    ("signals", "env", "code", "requeued", "last_step"),
    [
        *(((), {"srun": srun}, code, False, "") for srun, code in (("true", 0), ("exit 7", 7), ("exit 138", 138))),
        *(((), {"srun": srun}, 75, True, "") for srun in ('touch "$ODC_MPI_STOPPED_FILE"', "exit 75")),
        # Ranks that start while the job is stopped find a file; ranks are notified once.
        ((signal.SIGUSR1,), {"srun": DEAF}, 75, True, ""),
        ((signal.SIGUSR1, signal.SIGUSR1), {"srun": UNTIL_SIGNALED}, 75, True, ""),
        # A canceled job leaves no files; here the ranks have removed the copies.
        *(((signal.SIGTERM,), {"srun": SAVED, **staged}, 143, False, "") for staged in ({}, STAGED)),
        # Signals while the data set is copied: nothing is trained.
        ((signal.SIGUSR1,), {"sbcast": COPYING, **STAGED}, 75, True, REMOVED),
        ((signal.SIGTERM,), {"sbcast": COPYING, **STAGED}, 143, False, REMOVED),
        # A run that fails leaves no copy.
        ((), {"srun": "exit 2", **STAGED}, 2, False, REMOVED),
    ],
)
def test_how_a_job_ends(place, signals, env, code, requeued, last_step):
    assert (place.signal(*signals, **env) if signals else place.run(TRAIN, **env)[0]) == code
    assert place.calls("scontrol") == ["requeue 12"] * requeued
    steps = place.calls("srun")
    assert steps[-1].endswith(last_step) and (len(steps) == 1 or "exit 2" in env.get("srun", ""))
    assert not list(place.path.glob(".*stop*"))


def test_ranks_get_the_arguments_and_the_environment_of_the_script(place):
    ended = place.run(TRAIN, "--config", "my file", srun='[ "$SLURM_EXPORT_ENV" = ALL ]', SLURM_EXPORT_ENV="NONE")
    assert ended == (0, "") and place.calls("srun")[0].endswith("odc-mpi train --config my file")


def test_a_number_without_settings_does_not_train(place):
    code, output = place.run(TEMPLATES["sweep"], SLURM_ARRAY_JOB_ID="9", SLURM_ARRAY_TASK_ID="3")
    assert code != 0 and "there is no line of settings for index 3" in output
    assert place.calls("srun") == []


def test_the_copy_is_used_for_training_and_removed_if_the_ranks_cannot(place):
    srun, left = '[ "$ODC_MPI_STAGED_FILE" = "/local/12-data of mine.h5" ]', place.path / "12-data"
    assert place.run(TRAIN, "--config", "c", srun=srun, **STAGED) == (0, "")
    assert place.calls("sbcast") == ["--force data of mine.h5 /local/12-data of mine.h5"]
    (call,) = place.calls("srun")
    assert call.endswith("--config c --data.path /local/12-data of mine.h5")
    staged = {"STAGE": str(place.path), "DATA": str(place.path / "data")}
    assert place.run(TRAIN, sbcast=f"touch '{left}'", **staged) == (0, "")
    assert not left.exists() and place.calls("srun")[-1].endswith(f"rm -f {left}")


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

"""`odc-mpi run` with real ranks: killed, at fault, stopped, on a full disk; what it costs, and that nothing is left."""

import json
import os
import random
import re
import signal
import sys
import time

import pytest
from crash_cases import CONSTANT, ENDLESS, small_disk
from mpi_launch import odc_mpi, start
from small_run import last_step, losses

#: Kills in ordinary tests; more by hand, as in ODC_MPI_KILLS=20.
KILLS = int(os.environ.get("ODC_MPI_KILLS", "2"))
EVERY = 5
#: For each wait, in seconds: a start on a busy machine takes most of it.
LIMIT_S = 200
pytestmark = pytest.mark.timeout(2 * LIMIT_S)
EXACT = ("--run.exact", "true", *CONSTANT, "--run.checkpoint_every", EVERY)


def supervise(config, ranks, *arguments, options=(), program=(), **env):
    training = (*program, "train", "--config", config, *arguments)
    return start(0, "-m", "odc_mpi", "run", "--ranks", ranks, *options, "--", *training, timeout_s=LIMIT_S, **env)


def kill_and_time(job, run_dir, ranks):
    """Kill a rank some steps later; return the seconds until the next new step."""
    due = last_step(run_dir) + random.randrange(2, 2 * EVERY)
    job.wait_until(lambda: last_step(run_dir) >= due and len(job.ranks()) == ranks)
    began, before = time.monotonic(), last_step(run_dir)
    os.kill(random.choice(list(job.ranks().values())), signal.SIGKILL)
    job.wait_until(lambda: last_step(run_dir) > before + 1)  # one step may be on its way
    return time.monotonic() - began


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.library
@pytest.mark.timeout(2 * LIMIT_S + 60 * KILLS)
def test_a_killed_run_has_the_parameters_of_an_undisturbed_one(config, tmp_path):
    run_dir, seconds = tmp_path / "run", []
    for turn, ranks in enumerate((3, 2, 3)[: max(2, KILLS)]):
        kills = KILLS // 3 + (turn < KILLS % 3) if KILLS > 2 else 1
        job = supervise(config, ranks, "--run.steps", ENDLESS, *EXACT, options=("--max-restarts", kills))
        seconds += [kill_and_time(job, run_dir, ranks) for _ in range(kills)]
        job.send_signal(signal.SIGTERM)
        done = job.finish()
        assert done.code == 75 and f"Restart {kills} of at most {kills}" in done.err, done
    found = summary(run_dir)
    steps = last_step(run_dir)
    assert found["restarts"] == KILLS and found["lost_steps"] <= 2 * EVERY * KILLS and found["steps"] == steps
    alone = odc_mpi(0, "train", "--config", config, *EXACT, "--run.steps", steps, "--run.dir", tmp_path / "alone")
    assert alone.code == 0
    assert found["parameters_digest"] == summary(tmp_path / "alone")["parameters_digest"]
    assert losses(run_dir) == losses(tmp_path / "alone")
    costs = {key: value for key, value in found.items() if key.startswith("lost_")}
    print(f"seconds to the next new step: {[round(each, 1) for each in seconds]}; {costs}")


#: A rank that raises an error after the third step of the first start.
FAILS = """
import sys
from pathlib import Path
from odc_mpi.cli import main as cli
from odc_mpi.runtime.start.launch import launched_rank
from odc_mpi.training.loop import Trainer
step = Trainer.step
def fail(self):
    if self.completed_steps == 3 and launched_rank() == 1 and not Path("failed").exists():
        Path("failed").touch()
        raise RuntimeError("my own mistake")
    return step(self)
Trainer.step = fail
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.library
def test_an_error_of_a_rank_is_named(config, tmp_path):
    program = (sys.executable, "-c", FAILS)
    done = supervise(config, 2, "--run.steps", 6, program=program, cwd=tmp_path).finish()
    assert done.code == 0 and last_step(tmp_path / "run") == 6
    failure = r"rank 1 on \S+ failed \(RuntimeError: my own mistake\), after step 3\. .*Restart 1"
    assert len(re.findall(f"odc-mpi: {failure}", done.err)) == 1, done.err
    assert summary(tmp_path / "run")["lost_steps"] == 3 and not (tmp_path / "run" / "failure.json").exists()


@pytest.mark.library
def test_nothing_outlives_a_supervisor_that_is_killed_or_interrupted_while_it_restarts(config, tmp_path):
    for event in ("killed", "interrupted"):
        job = supervise(config, 2, "--run.steps", ENDLESS, "--run.dir", tmp_path / event)
        job.wait_until(lambda: last_step(tmp_path / event) >= 3)  # noqa: B023 - called at once
        if event == "killed":
            job.send_signal(signal.SIGKILL)
            job.finish()  # fails if a process is left
        else:
            os.kill(job.ranks()[1], signal.SIGKILL)
            job.wait_until(lambda: "Restart 1 of" in job.err)  # noqa: B023
            job.send_signal(signal.SIGINT)
            done = job.finish()
            assert done.code == 75 and "Traceback" not in done.err, done


@pytest.mark.slow
def test_errors_that_every_start_would_repeat_are_not_repeated(config, tmp_path):
    done = supervise(config, 2, "--data.path", "none.h5").finish()
    assert done.code == 2 and done.err.count("odc-mpi: ") == 1 and not (tmp_path / "run").exists()
    if os.geteuid() == 0:
        with small_disk(tmp_path / "run", "400k"):
            done = supervise(config, 2, "--run.checkpoint_every", 2).finish()
            assert done.code == 1 and "Restart" not in done.err and "No space left on device" in done.err

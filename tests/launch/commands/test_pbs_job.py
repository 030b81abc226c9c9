"""A job of `odc-mpi job --scheduler pbs` that is signaled, submits itself again, and resumes. `qsub` keeps scripts."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from mpi_launch import Job, environment
from small_run import last_step, losses

from odc_mpi.cli.main import main

STEPS = 60
QSUB = """#!/bin/bash
number=$(ls "$SPOOL" | wc -l)
case $1 in -v) echo "$2" > "$SPOOL.env" ; cat "$3" ;; *) cat ;; esac > "$SPOOL/$number.SC"
echo "$number.server"
"""


@pytest.mark.library
@pytest.mark.timeout(240)
def test_a_pbs_job_that_is_signaled_submits_its_continuation(config, tmp_path, monkeypatch):
    """The signal reaches each process of the job, as by qsig: the script, mpiexec, its helpers and the ranks."""
    spool, program = tmp_path / "spool", tmp_path / "qsub"
    spool.mkdir()
    program.write_text(QSUB)
    program.chmod(0o755)
    (tmp_path / "nodes").write_text("localhost\n" * 2)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SPOOL", str(spool))
    size = ["--ranks-per-node", "2", "--cores-per-rank", "1", "--run.steps", str(STEPS), "--run.resume", "never"]
    assert main(["job", str(config), "--scheduler", "pbs", "--submit", *size]) == 0
    first = begin(spool, 0)
    first.wait_until(lambda: last_step(tmp_path / "run") >= 5)
    for pid in first.processes():
        os.kill(pid, signal.SIGUSR1)
    done = first.finish()
    after = int(re.search(r"stopped on request after step (\d+); checkpoint saved", done.err).group(1))
    assert done.code == 75 and done.out.endswith("1.server\n"), done.out + done.err
    assert (tmp_path / "spool.env").read_text() == "ODC_MPI_RESUBMITTED=1\n"
    done = begin(spool, 1, ODC_MPI_RESUBMITTED="1").finish()
    assert done.code == 0, done.err
    assert f"resuming from step {after}:" in done.out and len(losses(tmp_path / "run")) == STEPS
    assert len(list(spool.iterdir())) == 2 and not list(tmp_path.glob(".*stop*"))


def begin(spool, number, **more):
    job = {"PBS_JOBID": f"{number}.server", "PBS_O_WORKDIR": spool.parent, "PBS_NODEFILE": spool.parent / "nodes"}
    return Job(["bash", spool / f"{number}.SC"], env=environment(**job, **more))

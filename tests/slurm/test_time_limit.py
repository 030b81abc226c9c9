"""A job that Slurm itself stops before its time is up, with the template's own --signal: it continues by itself.

Takes about five minutes, since Slurm counts limits in minutes: only with ODC_MPI_LONG=1, as `make soak` has it.
"""

import os
import re
import sys
from pathlib import Path

import pytest
from slurm_jobs import LIMIT_S

pytestmark = [
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.skipif(os.environ.get("ODC_MPI_LONG") != "1", reason="takes five minutes: make soak"),
]

#: A training with enough steps of at least `SLOW_S` that Slurm stops it: with four minutes of time
#: and 120 s of warning that comes 90 to 120 s after its start, which takes a minute where others use the machine, too.
SLOW_S, SLOW_STEPS = 1.0, 120
SLOW = f"""#!{sys.executable}
import sys, time
from odc_mpi.cli import main as cli
from odc_mpi.cli import train
on_ranks = train.run_on_all_ranks
def slowly(world, work):
    from odc_mpi.training.loop import Trainer
    step = Trainer.step
    Trainer.step = lambda self: (time.sleep({SLOW_S}), step(self))[1]
    return on_ranks(world, work)
train.run_on_all_ranks = slowly
sys.exit(cli.main())
"""


def train_slowly(place):
    """Train in one process for longer than the time limit lets it, though the settings are those of the quick start."""
    program = place.path / "slow" / "odc-mpi"
    program.parent.mkdir()
    program.write_text(SLOW)
    program.chmod(0o755)
    path = f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    settings = ["--run.steps", SLOW_STEPS, "--run.resume", "never", *place.records("slow-run")]
    return place.train("train", *settings, options=["--time=4"], PATH=path)


def test_slurm_itself_stops_a_job(place):
    output = place.finish(train_slowly(place))
    after = [int(step) for step in re.findall(r"stopped on request after step (\d+); checkpoint saved", output)]
    assert after and place.summary("slow-run")["slurm_restarts"] >= len(after)
    assert all(f"resuming from step {step}:" in output for step in after)
    assert [line["step"] for line in place.steps("slow-run")] == list(range(1, SLOW_STEPS + 1))
    assert not list((place.path / "slow-run").glob("earlier-*")), "never means the first start"

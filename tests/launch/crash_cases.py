"""What happens to training runs, and what they owe whoever starts them again.

A case is a sequence of starts, each with its number of ranks, the point that it comes to, and what happens there. Add a
case to a table, and a point here if none of `POINTS` fits; `CrashedRun` starts, waits, kills and checks.
"""

import os
import random
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from mpi_launch import end_all, finish, start
from small_run import last_step, losses

from odc_mpi.checkpoint.commands import verify
from odc_mpi.checkpoint.manifest import steps_in
from odc_mpi.training.recipes.dpo.reference import FILE

#: Exit codes of runs to which this happened, and None for any that says that something went wrong.
CODES = {"kill": None, "SIGUSR1": 75, "SIGINT": 75, "SIGTERM": 75, "end": 0}
CONSTANT = ("--optim.lr_scheduler_type", "constant")
ENDLESS = 100_000


@dataclass(frozen=True)
class Start:
    """A start on some ranks, the point that it comes to, and what happens there: a key of `CODES`."""

    ranks: int
    point: str = "end"
    happens: str = "kill"


@dataclass
class CrashedRun:
    """A run of a configuration, and what was seen of it: its last step and checkpoint before the current start."""

    config: Path
    every: int = 0
    settings: tuple = CONSTANT
    timeout_s: float = 90
    seen: int = 0
    newest: int = 0
    ends: list = field(default_factory=list)

    @property
    def directory(self):
        return self.config.parent / "run"

    def begin(self, ranks, *arguments):
        """Start it, without end unless the arguments say otherwise."""
        saving = ("--run.checkpoint_every", self.every) if self.every else ()
        train = ("-m", "odc_mpi", "train", "--config", self.config, "--run.steps", ENDLESS)
        return start(ranks, *train, *saving, *self.settings, *arguments, timeout_s=self.timeout_s)

    def come_to(self, job, point, ranks):
        """Wait for a point of a job."""
        if self.newest:
            job.wait_for(f" resuming from step {self.newest}:")
        if point.startswith("step "):
            due = self.seen + int(point.removeprefix("step "))
            job.wait_until(lambda: last_step(self.directory) >= due)
        elif point == "resuming":
            time.sleep(random.uniform(0, 0.5))
        elif point == "checkpoint":
            job.wait_until(lambda: self.newest_checkpoint() > self.newest)
        elif point == "references":
            job.wait_until((self.directory / FILE).exists)
        job.wait_until(lambda: len(job.ranks()) >= ranks)

    def newest_checkpoint(self):
        return max(steps_in(self.directory / "checkpoints"), default=0)

    def happen(self, job, what):
        """Do what happens; return how the job ended, which is as it should."""
        if what == "kill":
            os.kill(random.choice(list(job.ranks().values())), signal.SIGKILL)
        elif what != "end":
            job.send_signal(signal.Signals[what])  # which MPICH's mpiexec passes on to its ranks
        done = finish(job)
        code = CODES[what]
        assert done.code not in (0, 2) if code is None else done.code == code, (done.out, done.err)
        self.check(what, done)
        return done

    def check(self, what, done):
        """Check what there is to go on from.

        Of a crash, the interval that was being written is lost, and the one after it, as steps are shorter than that.
        """
        seen, newest = last_step(self.directory), self.newest_checkpoint()
        assert newest >= self.newest
        if what == "kill" and self.every:
            assert seen - newest <= 2 * self.every, f"of {seen} steps the checkpoint has {newest}"
        if what not in ("kill", "end"):
            assert "stopped on request after step" in done.err
            assert len(losses(self.directory)) == seen == newest
        self.seen, self.newest = seen, newest
        self.ends.append((done, newest))

    def endure(self, starts):
        for each in starts:
            job = self.begin(each.ranks)
            self.come_to(job, each.point, each.ranks)
            self.happen(job, each.happens)
        lines, damaged = verify(self.directory)
        assert damaged == 0, lines


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

"""Runs that copy their state to memory, killed at any time: by hand with ODC_MPI_TEST_KILLS=50."""

import json
import os
import random
import signal
import time

import pytest
from crash_cases import CrashedRun
from mpi_launch import finish, odc_mpi, start
from small_run import last_step

from odc_mpi.checkpoint.commands import digest_line

KILLS = int(os.environ.get("ODC_MPI_TEST_KILLS", "2"))
EVERY = 2
EXACT = ("--run.exact", "--optim.adam_epsilon", 1e-8)


class RescuedRun(CrashedRun):
    """A run that saves to memory only; `lost` has the number of steps that each kill has cost."""

    def __init__(self, config):
        memory = config.parent / "memory"
        memory.mkdir()
        in_memory = ("--run.memory_every", EVERY, "--run.memory_dir", memory)
        super().__init__(config, settings=(*self.settings, *EXACT, *in_memory), timeout_s=240)
        self.memory, self.lost = memory, []

    def check(self, what, done):
        if what == "kill":
            rescued = odc_mpi(0, "checkpoint", "rescue", self.directory)
            assert (rescued.code, rescued.err) in ((0, ""), (3, "")) and rescued.out.count("\n") == 1
            newest = self.newest_checkpoint()
            assert rescued.code == 3 or f"rescued step {newest} from memory" in rescued.out
            print(f"{rescued.out[:-1]}  {len(self.lost)}")
        super().check(what, done)
        self.lost.append(self.seen - self.newest)
        assert list(self.memory.iterdir()) == []


@pytest.mark.timeout(240 + 60 * KILLS)
def test_kills_cost_two_intervals_and_change_nothing(config):
    """On changing numbers of ranks, which are killed during a step, a copy, or the start."""
    run = RescuedRun(config)
    for kill in range(KILLS):
        ranks = 3 - kill % 2
        job = run.begin(ranks)
        run.come_to(job, "step 1" if kill == 0 or random.random() < 0.9 else "resuming", ranks)
        time.sleep(random.uniform(0, 0.7))
        run.happen(job, "kill")
    assert max(run.lost) <= 2 * EVERY, run.lost
    steps = run.seen + 5
    run.happen(run.begin(2, "--run.steps", steps), "end")
    undisturbed = config.parent / "undisturbed"
    given = ("--config", config, "--run.steps", steps, "--run.dir", undisturbed, *CrashedRun(config).settings, *EXACT)
    assert odc_mpi(0, "train", *given).code == 0
    assert digest_line(undisturbed).split()[0] == digest_line(run.directory).split()[0]
    assert json.loads((run.directory / "summary.json").read_text())["memory_copies"] > 0


@pytest.mark.timeout(240)
def test_a_supervised_run_goes_on_from_the_copies_of_a_killed_rank(config, tmp_path):
    (tmp_path / "memory").mkdir()
    memory = ("--run.memory_every", 1, "--run.memory_dir", tmp_path / "memory")
    training = ("train", "--config", config, "--run.steps", 100_000, "--run.dir", tmp_path / "run", *memory)
    job = start(0, "-m", "odc_mpi", "run", "--ranks", 2, "--", *training)
    job.wait_until(lambda: last_step(tmp_path / "run") >= 5)
    os.kill(job.ranks()[1], signal.SIGKILL)
    job.wait_until(lambda: "ranks: 2" in job.err and last_step(tmp_path / "run") >= 9)
    job.send_signal(signal.SIGTERM)
    done = job.finish()
    assert done.code == 75 and "odc-mpi: rescued step " in done.err, done
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["restarts"] == 1 and summary["lost_steps"] <= 2 and list((tmp_path / "memory").iterdir()) == []


@pytest.mark.timeout(240)
def test_a_run_that_is_stopped_or_alive(config):
    """While it is alive it cannot be rescued; afterwards nothing is left in memory."""
    run = RescuedRun(config)
    job = run.begin(2)
    run.come_to(job, "step 3", 2)
    alive = odc_mpi(0, "checkpoint", "rescue", run.directory)
    assert alive.code == 2 and "is in use by another run" in alive.err and list(run.memory.iterdir())
    job.send_signal(signal.SIGUSR1)
    assert finish(job).code == 75
    assert list(run.memory.iterdir()) == []
    rescued = odc_mpi(0, "checkpoint", "rescue", run.directory)
    assert rescued.code == 3 and "has no states of this run" in rescued.out

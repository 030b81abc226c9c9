"""A rank of the second host fails, dies or is late: the job ends on both hosts, soon, and leaves nothing behind."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from fault_cases import TRACEBACK, Fault
from faults import SETTINGS, endure, set_network
from mpi_launch import script
from processes import command_line
from small_run import last_step
from two_hosts import LEFT_BEHIND, launch, start

from odc_mpi.checkpoint.groups import checkpoint_groups

LEAVES = """
import subprocess
from pathlib import Path
from mpi4py import MPI
Path("/dev/shm/odc_mpi-forgotten").touch()
if MPI.COMM_WORLD.rank == 1:
    subprocess.Popen(["setsid", "sleep", "543"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""

#: By default few, and always the same; ODC_MPI_FAULTS says how many, ODC_MPI_SEED which.
NUM_FAULTS = int(os.environ.get("ODC_MPI_FAULTS", "3"))
SEED = int(os.environ.get("ODC_MPI_SEED", "4"))


#: Two ranks per host: then there is shared memory on each that a dead job could leave behind.
FAULTS = {
    "is killed": Fault("is_killed", ranks=2, timeout_s=20, within_s=40),
    # Soon where MPI_Abort does what it is for; else, once Open MPI's did not, by the deadline of the others.
    "raises": Fault("raises last afterwards", says=("rank 3 failed", TRACEBACK), ranks=2, timeout_s=15, within_s=45),
    # Over TCP, where its page can be read only because a thread of it enters MPI now and then.
    "is late": Fault(
        "is_late_on_its_host",
        says=(
            "rank 0 on node0 waited more than 3 s while .*it waits for rank 1 on node1, "
            r"which was last seen \d+\.\d s ago, in microbatch 1, forward of unit \(root\)",
        ),
        ranks=1,
        timeout_s=30,
    ),
}


@pytest.mark.library
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_the_job_on_both_hosts(tmp_path, name):
    done, _ = FAULTS[name].check(FAULTS[name].start(tmp_path, begin=start))
    assert "left behind" not in done.err
    assert name != "is killed" or "training" in done.out


def test_leftovers_of_a_job_are_noticed(tmp_path):
    done = launch(1, script(tmp_path, LEAVES))
    assert done.code == LEFT_BEHIND
    assert "left behind: process sleep 543" in done.err
    assert "left behind: file /dev/shm/odc_mpi-forgotten" in done.err
    assert ["sleep", "543", ""] not in [command_line(path.name) for path in Path("/proc").glob("[0-9]*")]
    assert not Path("/dev/shm/odc_mpi-forgotten").exists()


@pytest.mark.library
@pytest.mark.timeout(240)
def test_a_run_goes_on_without_a_host_that_is_cut_off(config, tmp_path):
    """Noticed at the deadline by the other host; its launcher, which waits for the lost one, is ended.

    The other host has copies of the state of both ranks, newer than the last checkpoint.
    """
    for host in ("node0", "node1"):
        (tmp_path / host).mkdir()
    memory = ("--run.memory_every", 1, "--run.memory_dir", tmp_path / "%h", "--run.checkpoint_every", 1000)
    train = ("train", "--config", config, "--run.steps", 100_000, *memory, *SETTINGS)
    hosts = ("run", "--hosts", "node0:1,node1:1", "--", *train, "--comm.timeout_s", 4)
    job = start(0, "-m", "odc_mpi", *hosts, timeout_s=90, ODC_MPI_START_TIMEOUT_S=60)
    job.wait_until(lambda: last_step(tmp_path / "run") >= 8)
    with Path(f"/proc/{job.ranks()[1]}/ns/net").open() as host:
        set_network(host.fileno(), "down")
    began, before = time.monotonic(), last_step(tmp_path / "run")
    job.wait_until(lambda: last_step(tmp_path / "run") > before + 1)
    seconds = time.monotonic() - began
    for pid in job.processes():
        if "run" in command_line(pid):
            os.kill(pid, signal.SIGTERM)
    done = job.finish()
    assert done.code == 75 and "node1 does not answer. Restart 1" in done.err, done
    assert seconds < 60 and "odc-mpi: rescued step " in done.err, (seconds, done.err)
    restarts = (tmp_path / "run" / "restarts.json").read_text()
    assert json.loads(restarts)["lost_steps"] <= 2 and list((tmp_path / "node0").iterdir()) == []
    print(f"{seconds:.1f} s, {restarts}")


@pytest.mark.library
@pytest.mark.timeout(120)
def test_islands_go_on_without_one_that_is_stopped(config, tmp_path):
    """The first rank of its host, through which Open MPI leads RMA operations on windows that it allocates."""
    apart = ("--islands.by", 1, "--islands.mode", "outer", "--islands.sync_every", 4, "--islands.quorum", 2)
    train = ("train", "--config", config, "--run.steps", 100_000, *apart, "--islands.grace_s", 0.5)
    job = start("2,1", "-m", "odc_mpi", *train, "--comm.timeout_s", 30, timeout_s=90)
    islands = [tmp_path / "run" / "islands" / str(island) for island in range(3)]
    job.wait_until(lambda: last_step(islands[0]) >= 10)
    os.kill(job.ranks()[0], signal.SIGSTOP)
    before = [last_step(path) for path in islands]
    job.wait_until(lambda: min(last_step(path) for path in islands[1:]) > max(before) + 40)
    assert last_step(islands[0]) <= before[0] + 1
    os.kill(job.ranks()[0], signal.SIGCONT)
    job.wait_until(lambda: last_step(islands[0]) > before[0] + 20)
    os.kill(job.ranks()[2], signal.SIGTERM)
    done = job.finish()
    assert done.code == 75 and "does not wait for island 0, which is late" in done.err, done
    lines = [json.loads(line) for line in (islands[0] / "metrics.jsonl").read_text().splitlines()]
    assert max(line.get("lag", 0) for line in lines) >= 5
    assert len(checkpoint_groups(tmp_path / "run")[-1]) == 3


@pytest.mark.library
@pytest.mark.slow
@pytest.mark.timeout(240 + 60 * NUM_FAULTS)
def test_whatever_goes_wrong_a_run_goes_on_or_names_the_rank_and_is_resumed(tmp_path):
    """Faults at random moments, in a run that saves: the short form of `make soak`'s."""
    print(f"ODC_MPI_SEED={SEED}")
    ours, without_faults = endure(tmp_path, NUM_FAULTS, SEED)
    assert ours == pytest.approx(without_faults, rel=1e-5)

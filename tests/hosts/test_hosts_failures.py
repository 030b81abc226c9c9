"""A rank of the second host fails, dies or is late: the job ends on both hosts, soon, and leaves nothing behind."""

import os
import re
from pathlib import Path

import pytest
from faults import endure
from mpi_launch import script
from processes import command_line
from two_hosts import LEFT_BEHIND, launch

# Two ranks per host: then there is shared memory on each that a dead job could leave behind.
TRAINS = """
import os, signal, torch
import odc_mpi
world = odc_mpi.World(timeout_s=20)
model = odc_mpi.shard_model(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), world)
for step in range(10**9):
    with model.minibatch():
        model(torch.randn(8, 64)).mean().backward()
        if step == 5 and world.rank == 3:
            print("step 5", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    model.publish()
"""

RAISES = """
from odc_mpi import World
world = World(timeout_s=15)
world.gather_objects(None)
if world.rank == world.size - 1:
    raise KeyError("my own mistake")
world.gather_objects(None)
"""

LEAVES = """
import subprocess
from pathlib import Path
from mpi4py import MPI
Path("/dev/shm/odc_mpi-forgotten").touch()
if MPI.COMM_WORLD.rank == 1:
    subprocess.Popen(["setsid", "sleep", "543"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""

LATE = """
import time, torch
import odc_mpi
world = odc_mpi.World(timeout_s=30)
model = odc_mpi.shard_model(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), world)
world.timeout_s = 3
with model.minibatch():
    loss = model(torch.randn(8, 64)).mean()
    if world.node == 1:
        time.sleep(60)
    loss.backward()
model.publish()
"""


#: By default few, and always the same; ODC_MPI_FAULTS says how many, ODC_MPI_SEED which.
NUM_FAULTS = int(os.environ.get("ODC_MPI_FAULTS", "3"))
SEED = int(os.environ.get("ODC_MPI_SEED", "4"))


def test_a_killed_rank_ends_the_job_on_both_hosts(tmp_path):
    done = launch(2, script(tmp_path, TRAINS), timeout_s=60)
    assert "step 5" in done.out, done.err
    assert done.code not in (0, 124), done.err
    assert "left behind" not in done.err
    assert done.seconds < 40


def test_an_exception_ends_the_job_with_its_traceback(tmp_path):
    done = launch(2, script(tmp_path, RAISES), timeout_s=60)
    assert done.code not in (0, 124), done.err
    assert "rank 3 failed" in done.err
    assert 'raise KeyError("my own mistake")' in done.err
    assert "left behind" not in done.err
    # Soon where MPI_Abort does what it is for; else, once Open MPI's did not, by the deadline of the others.
    assert done.seconds < 45


def test_a_late_host_is_named_with_what_it_was_doing(tmp_path):
    """Over TCP, where its page can be read only because a thread of it enters MPI now and then."""
    done = launch(1, script(tmp_path, LATE), timeout_s=60)
    assert done.code not in (0, 124), done.err
    errors = re.search(r"rank 0 on node0 waited more than 3 s while .*", done.err)
    assert errors, done.err
    doing = r"which was last seen \d+\.\d s ago, in microbatch 1, forward of unit \(root\)"
    assert re.search(rf"it waits for rank 1 on node1, {doing}", errors.group()), done.err
    assert "left behind" not in done.err


def test_leftovers_of_a_job_are_noticed(tmp_path):
    done = launch(1, script(tmp_path, LEAVES))
    assert done.code == LEFT_BEHIND
    assert "left behind: process sleep 543" in done.err
    assert "left behind: file /dev/shm/odc_mpi-forgotten" in done.err
    assert ["sleep", "543", ""] not in [command_line(path.name) for path in Path("/proc").glob("[0-9]*")]
    assert not Path("/dev/shm/odc_mpi-forgotten").exists()


@pytest.mark.slow
@pytest.mark.timeout(240 + 60 * NUM_FAULTS)
def test_whatever_goes_wrong_a_run_goes_on_or_names_the_rank_and_is_resumed(tmp_path):
    """Faults at random moments, in a run that saves: the short form of `make soak`'s."""
    print(f"ODC_MPI_SEED={SEED}")
    ours, without_faults = endure(tmp_path, NUM_FAULTS, SEED)
    assert ours == pytest.approx(without_faults, rel=1e-5)

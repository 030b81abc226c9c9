"""The two hosts themselves: nothing is left of them."""

from pathlib import Path

from mpi_launch import script
from processes import descendants
from two_hosts import LEFT_BEHIND, launch

LEAVES = """
import subprocess
from pathlib import Path
from mpi4py import MPI
Path("/dev/shm/odc_mpi-forgotten").touch()
if MPI.COMM_WORLD.rank == 1:
    subprocess.Popen(["setsid", "sleep", "543"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""


def test_leftovers_of_a_job_are_noticed(tmp_path):
    done = launch(1, script(tmp_path, LEAVES))
    assert done.code == LEFT_BEHIND
    assert "left behind: process sleep 543" in done.err
    assert "left behind: file /dev/shm/odc_mpi-forgotten" in done.err
    assert ["sleep", "543", ""] not in descendants(1).values()
    assert not Path("/dev/shm/odc_mpi-forgotten").exists()

"""The two hosts themselves: what MPI and `World` see of them, and that nothing is left."""

import json
from pathlib import Path

from mpi_launch import script
from two_hosts import LEFT_BEHIND, launch

PLACES = """
import json, socket, sys
from pathlib import Path
from odc_mpi import World
world = World(timeout_s=20)
names = ("rank", "size", "local_rank", "local_size", "node", "num_nodes")
place = {name: getattr(world, name) for name in names} | {"host": socket.gethostname()}
Path(sys.argv[1], f"{world.rank}.json").write_text(json.dumps(place))
"""

LEAVES = """
import subprocess
from pathlib import Path
from mpi4py import MPI
Path("/dev/shm/odc_mpi-forgotten").touch()
if MPI.COMM_WORLD.rank == 1:
    subprocess.Popen(["setsid", "sleep", "543"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""


def running(word):
    """The processes of this machine that have a word on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path.parent.name] if str(word).encode() in path.read_bytes() else []
        except OSError:
            continue
    return found


def test_the_world_has_two_nodes(tmp_path):
    done = launch(2, script(tmp_path, PLACES), tmp_path)
    assert done.code == 0, done.err
    for rank in range(4):
        local = {"local_rank": rank % 2, "local_size": 2, "node": rank // 2, "host": f"node{rank // 2}"}
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {"rank": rank, "size": 4, "num_nodes": 2, **local}


def test_leftovers_of_a_job_are_noticed(tmp_path):
    done = launch(1, script(tmp_path, LEAVES))
    assert done.code == LEFT_BEHIND
    assert "left behind: process sleep 543" in done.err
    assert "left behind: file /dev/shm/odc_mpi-forgotten" in done.err
    assert not running("\0".join(["sleep", "543"]))
    assert not Path("/dev/shm/odc_mpi-forgotten").exists()

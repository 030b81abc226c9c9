"""The two hosts themselves: what MPI and `World` see of them, that a network lies between, that nothing is left."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import two_hosts
from two_hosts import LEFT_BEHIND, TIMED_OUT, finish, launch, start

PLACES = """
import json, socket, sys
from pathlib import Path
from odc_mpi import World
world = World(timeout_s=20)
names = ("rank", "size", "local_rank", "local_size", "node", "num_nodes")
place = {name: getattr(world, name) for name in names} | {"host": socket.gethostname()}
Path(sys.argv[1], f"{world.rank}.json").write_text(json.dumps(place))
"""

# Rank 1 is on the other host. Ethernet's counters show what really crossed the network.
CROSSES = """
import torch
from pathlib import Path
from odc_mpi import World
from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.layout import FlatLayout, ParameterSpec
world = World(timeout_s=20)
transport = window_transport(world)
transport.allocate([FlatLayout.build("unit", [ParameterSpec("p", (4 << 20,), True)], world.size)])
transport.parameters.shard(0).fill_(world.rank + 1)
counter = Path("/sys/class/net/eth0/statistics/rx_bytes")
before = int(counter.read_text())
transport.publish_parameters()
if world.rank == 0:
    fetched = transport.parameters.fetch(0).wait()
    assert fetched.sum().item() == (1 + 2) * (2 << 20), fetched
transport.publish_parameters()
if world.rank == 0:
    print("received", int(counter.read_text()) - before)
"""

SLEEPS = "import sys, time\nfrom mpi4py import MPI\nsys.stdout.write('up\\n')\nsys.stdout.flush()\ntime.sleep(600)\n"

LEAVES_A_PROCESS = """
import subprocess
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    subprocess.Popen(["setsid", "sleep", "543"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""

LEAVES_A_FILE = "from pathlib import Path\nfrom mpi4py import MPI\nPath('/dev/shm/odc_mpi-forgotten').touch()\n"


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


def running(word):
    """The processes of this machine that have a word on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path.parent.name] if str(word).encode() in path.read_bytes() else []
        except OSError:
            continue
    return found


def namespaces():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=10).stdout


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_the_world_has_two_nodes(tmp_path, ranks_per_host):
    done = launch(ranks_per_host, script(tmp_path, PLACES), tmp_path)
    assert done.code == 0, done.err
    places = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2 * ranks_per_host)]
    for rank, place in enumerate(places):
        assert place == {
            "rank": rank,
            "size": 2 * ranks_per_host,
            "local_rank": rank % ranks_per_host,
            "local_size": ranks_per_host,
            "node": rank // ranks_per_host,
            "num_nodes": 2,
            "host": f"node{rank // ranks_per_host}",
        }


def test_a_fetch_from_the_other_host_crosses_the_network(tmp_path):
    done = launch(1, script(tmp_path, CROSSES))
    assert done.code == 0, done.err
    # The other host's half of the unit, and little more.
    assert 8 << 20 <= int(done.out.split()[1]) < 9 << 20, done.out


def test_a_job_that_hangs_ends_at_the_deadline(tmp_path):
    path = script(tmp_path, SLEEPS)
    before = namespaces()
    process = start(1, path)
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    done = finish(process, timeout_s=1)
    assert done.code == TIMED_OUT
    assert "did not end within 1 s" in done.err
    assert done.seconds < 20
    assert not running(path)
    assert namespaces() == before


def test_nothing_is_left_when_the_harness_itself_is_killed(tmp_path):
    path = script(tmp_path, SLEEPS)
    harness = subprocess.Popen(
        [sys.executable, two_hosts.__file__, "--", path], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    try:
        assert harness.stdout.readline() == "up\n"
        assert len(running(path)) >= 4, "the harness, its launcher and two ranks"
    finally:
        harness.kill()
        harness.wait()
        harness.stdout.close()
    deadline = time.monotonic() + 10
    while running(path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(path)


@pytest.mark.parametrize(
    ("text", "what"),
    [(LEAVES_A_PROCESS, "process sleep 543"), (LEAVES_A_FILE, "file /dev/shm/odc_mpi-forgotten")],
    ids=["process", "file"],
)
def test_leftovers_of_a_job_are_noticed(tmp_path, text, what):
    done = launch(1, script(tmp_path, text))
    assert done.code == LEFT_BEHIND
    assert f"left behind: {what}" in done.err
    assert not running("\0".join(["sleep", "543"]))
    assert not Path("/dev/shm/odc_mpi-forgotten").exists()


def test_by_hand(tmp_path):
    path = script(tmp_path, "import sys\nfrom mpi4py import MPI\nprint(sys.argv[1:])\n")
    command = [sys.executable, two_hosts.__file__, "--ranks-per-host", "2", "--", path, "--words", "a b"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("['--words', 'a b']") == 4

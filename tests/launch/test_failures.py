"""One rank fails, dies or is late: the whole job ends, soon, and says whose fault it was."""

import os
import signal
import time
from pathlib import Path

import pytest
from mpi_launch import finish, launch, start

LATE = """
import sys, time
from odc_mpi import World
world = World(timeout_s=2)
if world.rank == 1:
    time.sleep(60)
world.gather_objects(None)
"""

RAISES = """
from odc_mpi import World
world = World(timeout_s=60)
if world.rank == 1:
    raise KeyError("my own mistake")
world.gather_objects(None)
"""

LEAVES = """
import sys
from odc_mpi import World
world = World(timeout_s=3)
if world.rank == 1:
    sys.exit(0)
world.gather_objects(None)
"""

TRAINS = """
import os, sys, torch
from pathlib import Path
import odc_mpi
world = odc_mpi.World(timeout_s=20)
model = odc_mpi.shard_model(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), world)
Path(sys.argv[1], f"{world.rank}.tmp").write_text(str(os.getpid()))
Path(sys.argv[1], f"{world.rank}.tmp").rename(Path(sys.argv[1], f"{world.rank}.pid"))
while True:
    with model.minibatch():
        model(torch.randn(8, 64)).mean().backward()
    model.publish()
"""


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


def shared_memory():
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_a_late_rank_ends_the_job_at_the_deadline(tmp_path):
    done = launch(2, script(tmp_path, LATE), timeout_s=50)
    assert done.code != 0
    assert "rank 0" in done.err
    assert "waited more than 2 s while gathering from all ranks" in done.err
    assert "comm.timeout_s" in done.err


def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(tmp_path):
    done = launch(2, script(tmp_path, RAISES), timeout_s=50)
    assert done.code != 0
    assert "rank 1 failed" in done.err
    assert 'raise KeyError("my own mistake")' in done.err
    assert done.seconds < 30


def test_a_rank_that_leaves_does_not_hang_the_others(tmp_path):
    assert launch(2, script(tmp_path, LEAVES), timeout_s=50).code != 0


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_ends_the_job_and_leaves_nothing_behind(tmp_path, victim):
    before = shared_memory()
    process = start(3, script(tmp_path, TRAINS), tmp_path)
    files = [tmp_path / f"{rank}.pid" for rank in range(3)]
    while not all(file.exists() for file in files):
        assert process.poll() is None, "the job ended by itself"
        time.sleep(0.1)
    pids = [int(file.read_text()) for file in files]
    os.kill(pids[victim], signal.SIGKILL)
    assert finish(process, 60).code != 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert shared_memory() <= before


def test_too_little_shared_memory_is_said_early(tmp_path):
    text = """
import odc_mpi, torch
from odc_mpi.comm.window import WindowTransport
from odc_mpi.shard.layout import FlatLayout, ParameterSpec
world = odc_mpi.World(timeout_s=20)
try:
    WindowTransport(world).allocate([FlatLayout.build("huge", [ParameterSpec("p", (1 << 44,), True)], world.size)])
except odc_mpi.UserError as error:
    print(error)
"""
    done = launch(2, script(tmp_path, text))
    assert done.code == 0, done.err
    assert done.out.count("/dev/shm has") == 2
    assert "room for the parameter and gradient windows" in done.out

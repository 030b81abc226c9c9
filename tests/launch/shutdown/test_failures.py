"""One rank fails or raises a user error: the whole job ends, soon, with a message that names the rank."""

import os
import re
import signal
import time

import pytest
from mpi_launch import finish, launch, script, start
from processes import is_running

#: An owner that never takes what lies in its mailbox.
NEVER_ANSWERS = """
import time, torch
from odc_mpi import CommConfig, World
from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.layout import FlatLayout, ParameterSpec
world = World(timeout_s=2)
transport = window_transport(world, comm=CommConfig(reduction="mailbox", mailbox_bytes=1000))
transport.allocate([FlatLayout.build("layers.3", [ParameterSpec("weight", (10_000,), True)], world.size)])
if world.rank == 1:
    time.sleep(60)
transport.gradients.push(0, torch.ones(10_000)).wait()
"""

RAISES = """
from odc_mpi import World
world = World(timeout_s=15)
if world.rank == 1:
    raise KeyError("my own mistake")
world.gather_objects(None)
"""

#: A thread of this package ends on the last rank while all others wait for that rank; no time-out expires.
THREAD_FAILS = """
import time
from odc_mpi import World
from odc_mpi.comm.progress import ProgressThread
from odc_mpi.runtime.status import StatusPage
world = World(timeout_s=100)
def fail(*_):
    raise KeyError("my own mistake")
work = fail if world.rank == world.size - 1 else lambda *_: None
{start_work}
if world.rank == world.size - 1:
    time.sleep(30)
world.gather_objects(None)
"""
USER_THREAD_FAILS = """
import threading
from odc_mpi import World
world = World(timeout_s=20)
def fail():
    raise KeyError("my own mistake")
thread = threading.Thread(target=fail)
thread.start()
thread.join()
world.gather_objects(None)
print("fine")
"""

LAUNCHER_STOPPED = """
import os, signal, sys
from pathlib import Path
from odc_mpi import World
world = World(timeout_s=3)
here = Path(sys.argv[1])
here.joinpath(f"rank{world.rank}").write_text(str(os.getpid()))
world.gather_objects(None)
if world.rank == 1:
    # Launchers and their helpers: all that this descends from, up to the test.
    above, process = [], os.getppid()
    while process != int(sys.argv[2]):
        above.append(process)
        process = int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
    for process in above:
        os.kill(process, signal.SIGSTOP)
    here.joinpath("stopped").write_text(" ".join(map(str, above)))
    raise KeyError("my own mistake")
world.gather_objects(None)
"""

FETCHES_AHEAD = """
import sys, time, torch
import odc_mpi
from odc_mpi.comm.windows.parameters import WindowParameters
world = odc_mpi.World(timeout_s=20)
layers = [torch.nn.Linear(64, 64) for _ in range(4)]
copies = odc_mpi.CommConfig(zero_copy="off")  # else there is nothing to fetch ahead
model = odc_mpi.shard_model(torch.nn.Sequential(*layers), world, units=layers, comm=copies)
for _ in range(2):
    with model.minibatch():
        model(torch.randn(8, 64)).mean().backward()
    model.publish()
fetch = WindowParameters.start_fetch
WindowParameters.start_fetch = lambda self, *arguments: (time.sleep(0.5), fetch(self, *arguments))[1]
with model.minibatch():
    y = model.module[0](torch.randn(8, 64))
    assert "fetching" in [unit.state.value for unit in model.units]
    if world.rank == 1:
        raise KeyError("my own mistake")
    if world.size == 1:
        sys.exit(int(sys.argv[1]))
model.publish()
"""


@pytest.mark.library
@pytest.mark.quick
def test_a_late_rank_ends_the_job_at_the_deadline(tmp_path):
    done = launch(2, script(tmp_path, NEVER_ANSWERS), timeout_s=50)
    assert done.code != 0 and done.seconds < 30
    waits = r"rank 0 on \S+ waited more than 2 s while waiting for room to push the gradient of unit layers\.3: "
    assert re.search(waits + "it waits for rank 1 ", done.err), done.err


@pytest.mark.parametrize(
    "text",
    [pytest.param(RAISES, marks=[pytest.mark.library, pytest.mark.quick]), FETCHES_AHEAD],
    ids=["waiting", "fetching ahead"],
)
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(tmp_path, text):
    done = launch(2, script(tmp_path, text), timeout_s=50)
    assert done.code != 0
    assert "rank 1 failed" in done.err
    assert 'raise KeyError("my own mistake")' in done.err
    assert done.seconds < 30


def test_ranks_with_the_same_error_print_one_traceback(tmp_path):
    text = RAISES.replace("if world.rank == 1:", "if True:")
    done = launch(2, script(tmp_path, text), timeout_s=50)
    assert done.code != 0 and done.err.count("Traceback") == 1
    assert "rank 0 failed" in done.err and 'raise KeyError("my own mistake")' in done.err


@pytest.mark.parametrize(
    ("thread", "ranks", "start_work"),
    [
        ("watchdog", 1, "StatusPage.heartbeat = work"),
        ("status", 2, "world.prepare_threads(work)"),
        ("progress", 2, "ProgressThread(world, work)"),
    ],
)
def test_a_failed_thread_of_the_package_ends_the_job_with_its_traceback(tmp_path, thread, ranks, start_work):
    done = launch(ranks, script(tmp_path, THREAD_FAILS.format(start_work=start_work)), timeout_s=50)
    assert done.code != 0 and done.seconds < 25
    assert f"rank {ranks - 1} failed in its thread odc_mpi-{thread}:" in done.err
    assert 'raise KeyError("my own mistake")' in done.err


def test_a_thread_of_the_user_s_that_ends_does_not_end_the_job(tmp_path):
    done = launch(2, script(tmp_path, USER_THREAD_FAILS), timeout_s=50)
    assert done.code == 0, done.err
    assert done.out.count("fine") == 2
    assert done.err.count('raise KeyError("my own mistake")') == 2


@pytest.mark.library
def test_ranks_end_by_themselves_where_their_launcher_does_not_answer(tmp_path):
    """MPI_Abort asks the launcher to end all ranks: one that is stuck would leave them waiting forever."""
    job = start(2, script(tmp_path, LAUNCHER_STOPPED), tmp_path, os.getpid())
    stopped, deadline = tmp_path / "stopped", time.monotonic() + 50
    while not (stopped.exists() and stopped.read_text()) and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks = [int(tmp_path.joinpath(f"rank{rank}").read_text()) for rank in range(2)]
    try:
        while any(map(is_running, ranks)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(map(is_running, ranks))
    finally:
        for process in map(int, stopped.read_text().split()):
            os.kill(process, signal.SIGCONT)
    assert finish(job, timeout_s=30).code != 0  # what was said is lost where the launcher was to pass it on


def test_leaving_while_a_unit_is_fetched_ahead(tmp_path):
    """The thread ends before MPI does."""
    done = launch(1, script(tmp_path, FETCHES_AHEAD), 3, timeout_s=50)
    assert done.code == 3 and not done.err.count("Traceback"), done.err


@pytest.mark.library
def test_a_point_that_one_rank_leaves_out_is_named(tmp_path):
    """The others' numbers must not be taken for the norm: the run ends at the deadline instead of going wrong."""
    text = """
import odc_mpi, torch
world = odc_mpi.World(timeout_s=3)
model = odc_mpi.shard_model(torch.nn.Linear(4, 4), world)
for step in range(3):
    with model.minibatch("loss") as totals:
        model(torch.ones(1, 4)).sum().backward()
    if world.rank == 0:
        model.clip_grad_norm_(1.0)
    model.publish()
    print("passed", step)
"""
    done = launch(2, script(tmp_path, text), timeout_s=60)
    assert done.code != 0
    assert "synchronizing at" in done.err
    assert "no rank is late, but in another collective is rank" in done.err
    assert "passed 1" not in done.out


@pytest.mark.library
@pytest.mark.quick
def test_a_launcher_of_another_mpi_is_noticed(tmp_path):
    text = "from odc_mpi import World\nWorld()\n"
    done = launch(0, script(tmp_path, text), OMPI_COMM_WORLD_SIZE=4, MPI4PY_RC_INITIALIZE="1")
    assert done.code != 0
    assert "the launcher started 4 processes" in done.err

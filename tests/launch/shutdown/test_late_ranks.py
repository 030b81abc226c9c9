"""A late rank is named with its last activity; the job ends and nothing stays behind."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from mpi_launch import finish, left_behind, start

#: Every script begins with this: rank 1 is the one that misbehaves, on microbatch 2 of the third minibatch.
PRELUDE = """
import os, sys, time
from pathlib import Path
import torch
import odc_mpi
from odc_mpi.comm.transport import ShardStorage
from odc_mpi.comm.factory import window_transport
from odc_mpi.shard.model import ShardedModel

world = odc_mpi.World(timeout_s=3)
Path(sys.argv[1], f"{world.rank}.tmp").write_text(str(os.getpid()))
Path(sys.argv[1], f"{world.rank}.tmp").rename(Path(sys.argv[1], f"{world.rank}.pid"))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.faulty = False

    def forward(self, x):
        x = self.linear(x)
        if self.faulty:
            misbehave()
        return x


def misbehave():
    time.sleep(60)


def train(model, blocks, between=lambda step: None):
    for step in range(1000):
        with model.minibatch():
            for microbatch in (1, 2, 3):
                blocks[1].faulty = world.rank == 1 and (step, microbatch) == (2, 2)
                model(torch.randn(2, 8)).mean().backward()
        between(step)
        model.publish()


blocks = [Block() for _ in range(3)]
module = torch.nn.Sequential(*blocks, torch.nn.Linear(8, 1))
"""

SLEEPS = """
train(odc_mpi.shard_model(module, world, units=[Block]), blocks)
"""

COMPUTES_BETWEEN_A_AND_B = """
def between(step):
    end = time.monotonic() + 60
    while step == 2 and world.rank == 1 and time.monotonic() < end:
        sum(range(1000))


train(odc_mpi.shard_model(module, world, units=[Block]), [Block() for _ in range(3)], between)
"""

LEAVES = """
world.timeout_s = 40


def misbehave():
    sys.exit(5)


train(odc_mpi.shard_model(module, world, units=[Block]), blocks)
"""

#: Rank 1 has the first of two chunks, rank 0 the second.
SLEEPS_IN_A_CHUNK = """
from odc_mpi.comm.context_parallel.kv_windows import KVWindows, KVSizes
from odc_mpi.comm.context_parallel.kv_exchange import WindowKVExchange
from odc_mpi.models.context_parallel_attention import context_parallel_attention

windows = KVWindows(world, KVSizes(3, 64, 4, 4), shared=True)
while world.rank == 2:
    time.sleep(60)
with WindowKVExchange(windows, 1, (0, 4, 8), (1, 0), "sequence 7") as exchange:
    for layer in range(3):
        if (world.rank, layer) == (1, 2):
            world.set_status("forward of unit layers.2", 1)
            misbehave()
        context_parallel_attention(*torch.randn(3, 1, 1, 4, 8), None, layer, exchange)
"""

#: On one node every fetch and push completes, so here rank 1 waits for one that does not.
HANGS = """
class Hanging(ShardStorage):
    def allocate(self):
        parameters, gradients = transport.parameters, transport.gradients
        store, name, place, flush = {
            "fetch": (parameters, "start_gets", parameters._window, "flush"),
            "push": (gradients, "push", gradients, "_flush_local"),
        }["KIND"]
        started, start = [], getattr(store, name)

        def hanging(index, *arguments):
            started.append(index)
            if world.rank == 1 and started.count(len(parameters.layouts) - 1) == 4:
                setattr(place, flush, lambda: time.sleep(60))
            return start(index, *arguments)

        setattr(store, name, hanging)


world.timeout_s = 3 if world.rank == 1 else 60
transport = window_transport(world, comm=odc_mpi.CommConfig(zero_copy="off"))
transport.storages += (Hanging(),)
train(ShardedModel(module, transport, units=[Block]), [Block() for _ in range(3)])
"""

#: Ranks 0 and 1 are on one node, for which rank 1 has begun to fetch.
FETCHER_HANGS = """
from mpi4py import MPI
from odc_mpi.comm.windows.node_cache import NodeCache


class Pairs(MPI.Intracomm):
    def Split_type(self, kind, key=0, info=None):
        return self.Split(self.rank // 2)


def finish(self, index, claim, fetch):
    if world.rank == 1 and self.layouts[index].name == "2":
        claimed.touch()
        misbehave()
    original(self, index, claim, fetch)


claimed = Path(sys.argv[1], "claimed")
original, NodeCache._finish = NodeCache._finish, finish
nodes = odc_mpi.World(Pairs(world.comm), job=world.job)
model = ShardedModel(module, window_transport(nodes, comm=odc_mpi.CommConfig(progress="thread")), units=[Block])
world.timeout_s = 3 if world.rank == 0 else 60
with model.minibatch():
    while world.rank == 0 and not claimed.exists():
        time.sleep(0.01)
    model(torch.randn(2, 8))
"""

FETCHER_DIES = FETCHER_HANGS.replace("misbehave()", "os.kill(os.getpid(), 9)")
#: The process that the launcher starts and watches.
OUTLIVES_ITS_RANK = """
import subprocess, sys, time
subprocess.run([sys.executable, *sys.argv[1:]], close_fds=False)
time.sleep(60)
"""

FREES_TICKETS = """
tickets = odc_mpi.Tickets(world)
if world.rank == 1:
    time.sleep(60)
tickets.close()
"""

#: Islands merge after the third minibatch. Rank 1 is late; rank 3 waits for its difference, the others for both.
SLEEPS_BEFORE_MERGE = """
islands = odc_mpi.Islands(world, 2)
model = odc_mpi.shard_model(module, islands.island, units=[Block])
loop = odc_mpi.DiLoCo(islands, model, sync_every=3)


def between(step):
    if (world.rank, step) == (1, 2):
        misbehave()
    loop.step(1)


train(model, [Block() for _ in range(3)], between)
"""


@pytest.fixture
def shared_memory_stays():
    """Check that nothing new is in /dev/shm, but what other programs use there."""
    before = set(Path("/dev/shm").iterdir())
    yield
    assert wait_until(lambda: not left_behind(before)), left_behind(before)


def wait_until(condition, seconds=10.0):
    """A launcher may end a moment before the last of its ranks."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


class Job:
    """Some ranks of a script."""

    def __init__(self, tmp_path, text, *before, ranks=3):
        path = tmp_path / "script.py"
        path.write_text(PRELUDE + text)
        self.process = start(ranks, *before, path, tmp_path)
        files = [tmp_path / f"{rank}.pid" for rank in range(ranks)]
        assert wait_until(lambda: all(file.exists() for file in files) or self.process.poll() is not None, 60)
        assert self.process.poll() is None, finish(self.process)
        self.pids = [int(file.read_text()) for file in files]

    def end(self, timeout_s=60):
        """Return the lines of odc_mpi itself, and how long the end took."""
        done = finish(self.process, timeout_s)
        assert done.code != 0
        assert wait_until(lambda: not [pid for pid in self.pids if Path(f"/proc/{pid}").exists()]), self.pids
        return [line for line in done.err.splitlines() if line.startswith("odc_mpi: ")], done


def the_line(tmp_path, text, *before, ranks=3):
    lines, done = Job(tmp_path, text, *before, ranks=ranks).end()
    # One voice, but rather two than none.
    assert 1 <= len(lines) <= 2, done
    return lines[0]


WAITED = r"odc_mpi: rank \d on \S+ waited more than 3 s while "
NUMBER = r"\d+\.\d"
LAST_SEEN = f"which was last seen ({NUMBER}) s ago, "
SYNCHRONIZING = WAITED + "synchronizing at gradients_complete: it waits for rank 1 on \\S+, "
LIMIT = "; the limit is comm.timeout_s"

pytestmark = pytest.mark.usefixtures("shared_memory_stays")


def assert_line(pattern, line, at_least=2.0, at_most=20.0):
    found = re.fullmatch(pattern, line)
    assert found, f"{line}\nis not\n{pattern}"
    assert at_least <= float(found.group(1)) <= at_most, line


PUBLISHING = WAITED + "synchronizing at parameters_published: it waits for rank 1 on \\S+, "
FREEING = WAITED + "freeing the ticket counters: it waits for rank 1 on \\S+, "
CHUNK = "waiting for the keys and values of chunk 1 of 2 of sequence 7, layer 2: it waits for rank 1 on \\S+, "
OWNER = r"rank [02] on \S+, which was last seen \d+\.\d s ago, synchronizing at gradients_complete"
OWNERS = f"it waits for {OWNER.replace(NUMBER, f'({NUMBER})')}; {OWNER}"
FETCHED_FOR_NODE = (
    f"{WAITED}fetching unit 2, which another rank fetches for this node: it waits for rank 1 on \\S+, {LAST_SEEN}in "
    "microbatch 1, fetching unit 2"
)
LIBRARY = pytest.mark.library


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param(
            SLEEPS,
            SYNCHRONIZING + LAST_SEEN + "in microbatch 2, forward of unit 1",
            marks=[LIBRARY, pytest.mark.quick],
            id="sleeps in a forward",
        ),
        pytest.param(
            SLEEPS_IN_A_CHUNK,
            WAITED + CHUNK + LAST_SEEN + "in microbatch 1, forward of unit layers.2",
            id="sleeps in a chunk",
        ),
        pytest.param(
            COMPUTES_BETWEEN_A_AND_B,
            PUBLISHING + LAST_SEEN + "after synchronizing at gradients_complete",
            id="computes before parameters are published",
        ),
        pytest.param(FREES_TICKETS, FREEING + LAST_SEEN + ".*", marks=LIBRARY, id="never frees its tickets"),
        # A fetch or a push that does not complete names the owners.
        pytest.param(
            HANGS.replace("KIND", "fetch"), f"{WAITED}fetching unit 2: {OWNERS}", marks=LIBRARY, id="fetch hangs"
        ),
        pytest.param(FETCHER_HANGS, FETCHED_FOR_NODE, marks=LIBRARY, id="fetcher of a node hangs"),
        pytest.param(
            HANGS.replace("KIND", "push"),
            f"{WAITED}accumulating the gradient of unit 2: {OWNERS}",
            marks=LIBRARY,
            id="push hangs",
        ),
    ],
)
def test_who_is_waited_for_is_named_with_its_last_activity(tmp_path, text, line):
    assert_line(line + LIMIT, the_line(tmp_path, text))


def with_waiting(late, waiting):
    """Return a pattern for a late rank, and possibly a rank that waits for it, which may be named before or after."""
    return f"(?:{waiting}; )?{late}(?:; {waiting})?{LIMIT}"


@pytest.mark.library
def test_a_rank_that_sleeps_is_named_by_its_island_and_by_others(tmp_path):
    """Each side may be the first to report. The other rank of its island is late, too, since it waits."""
    model = "odc_mpi.shard_model(module, world, units=[Block], islands=odc_mpi.Islands(world, 2))"
    line = the_line(tmp_path, f"train({model}, blocks)\n", ranks=4)
    late = rf"rank 1 on \S+ \(island 0\), {LAST_SEEN}in microbatch 2, forward of unit 1"
    waiting = r"rank 0 on \S+ \(island 0\), [^;]*, waiting for the other ranks of island 0"
    own = "waiting for the other ranks of island 0: it waits for "
    others = "synchronizing at gradients_complete: it waits for "
    assert_line(f"{WAITED}(?:{own}|{others}){with_waiting(late, waiting)}", line)


@pytest.mark.library
def test_a_rank_that_other_islands_wait_for_is_named(tmp_path):
    """Each side may be the first to report."""
    line = the_line(tmp_path, SLEEPS_BEFORE_MERGE, ranks=4)
    late = rf"rank 1 on \S+ \(island 0\), {LAST_SEEN}after synchronizing at gradients_complete"
    waiting = r"rank 3 on \S+ \(island 1\), [^;]*, waiting for other islands"
    own = "waiting for other islands: it waits for "
    others = "synchronizing the ranks of an island: it waits for "
    assert_line(f"{WAITED}(?:{own}|{others}){with_waiting(late, waiting)}", line)


@pytest.mark.library
def test_a_stopped_rank(tmp_path):
    model, others = "odc_mpi.shard_model(module, world, units=[Block])", "[Block() for _ in range(3)]"
    job = Job(tmp_path, f"train({model}, {others}, lambda step: Path(sys.argv[1], 'trains').touch())\n")
    assert wait_until((tmp_path / "trains").exists, 60)
    os.kill(job.pids[2], signal.SIGSTOP)
    lines, done = job.end()
    assert 1 <= len(lines) <= 2, done
    places = "in microbatch [123], (?:forward|backward) of|synchronizing at|after synchronizing at|flushing|completing"
    doing = f"(?:{places}) .*"
    late = "it waits for rank 2 on \\S+, "
    # Stopped while it publishes, it may have let one of the others through, who then waits for both with its gradients.
    other = "(?:; rank [01] on \\S+, .*)?"
    assert_line(WAITED + ".*" + late + LAST_SEEN + doing + ", and shows no sign of life" + other + LIMIT, lines[0])
    assert done.seconds < 30


@pytest.mark.library
def test_a_killed_rank(tmp_path):
    job = Job(tmp_path, "train(odc_mpi.shard_model(module, world, units=[Block]), [Block() for _ in range(3)])\n")
    os.kill(job.pids[0], signal.SIGKILL)
    _, done = job.end()
    assert done.seconds < 15


@pytest.mark.library
def test_a_rank_killed_while_it_fetches_for_its_node(tmp_path):
    """The launcher does not notice it here, so the rank that waits for the fetch must."""
    line = the_line(tmp_path, FETCHER_DIES, "-c", OUTLIVES_ITS_RANK)
    assert_line(f"{FETCHED_FOR_NODE}, and shows no sign of life{LIMIT}", line)


@pytest.mark.library
@pytest.mark.quick
def test_a_rank_that_leaves_is_noticed_at_once(tmp_path):
    lines, done = Job(tmp_path, LEAVES).end()
    left = r"odc_mpi: rank 1 on \S+ has left while others wait for it: rank [02] on \S+, "
    assert_line(left + LAST_SEEN + "synchronizing at gradients_complete", lines[0], 0.0, 10.0)
    assert len(lines) == 1
    assert done.code == 1 and done.seconds < 25

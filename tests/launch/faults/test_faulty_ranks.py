"""One rank fails, is late, leaves or dies: the job ends soon, names the rank and its last activity, and leaves nothing.

`FAULTS` has a row for each program of `faulty_ranks.py`: what the job says at its end, and when.
"""

import os
import signal
from pathlib import Path

import pytest
from fault_cases import LAST_SEEN, NUMBER, TRACEBACK, Fault
from mpi_launch import finish, launch, left_behind, wait_until
from processes import is_running

WAITED = r"rank \d on \S+ waited more than 3 s while "
LIMIT = "; the limit is comm.timeout_s"
FOR_RANK_1 = ": it waits for rank 1 on \\S+, " + LAST_SEEN
FORWARD = "in microbatch 2, forward of unit 1"
A, AFTER_A = "synchronizing at gradients_complete", "after synchronizing at gradients_complete"
CHUNK = "waiting for the keys and values of chunk 1 of 2 of sequence 7, layer 2"
OWNER = rf"rank [02] on \S+, which was last seen {NUMBER} s ago, {A}"
OWNERS = f"it waits for {OWNER.replace(NUMBER, f'({NUMBER})', 1)}; {OWNER}"
BY_ANOTHER = "fetching unit 2, which another rank fetches for this node"
FETCHED_FOR_NODE = f"{WAITED}{BY_ANOTHER}{FOR_RANK_1}in microbatch 1, fetching unit 2"
NO_SIGN = ", and shows no sign of life"
LATE_AT_PUSH = r"^odc_mpi: rank 0 on \S+ waited more than 2 s while waiting for room to push the gradient of unit "
LATE_AT_PUSH += r"layers\.3: it waits for rank 1 "
ACTIVITIES = "in microbatch [123], (?:forward|backward) of|synchronizing at|after synchronizing at|flushing|completing"
#: Stopped while it publishes, it may have let one of the others through, who then waits for both with its gradients.
AND_ANOTHER = r"(?:; rank [01] on \S+, .*)?"
ON_ISLAND = rf"rank 1 on \S+ \(island 0\), {LAST_SEEN}"


def of_islands(own, others, late, waiting):
    """Return a pattern for a late rank, and possibly one that waits for it; each side may be the first to report."""
    named = f"(?:{waiting}; )?{late}(?:; {waiting})?"
    return f"{WAITED}(?:{own}|{others}): it waits for {named}{LIMIT}"


WAITS_ON_0 = r"rank 0 on \S+ \(island 0\), [^;]*, waiting for the other ranks of island 0"
WAITS_ON_1 = r"rank 3 on \S+ \(island 1\), [^;]*, waiting for other islands"
FAULTS = {
    "sleeps in a forward": Fault("sleeps", f"{WAITED}{A}{FOR_RANK_1}{FORWARD}{LIMIT}"),
    "sleeps in a chunk": Fault(
        "sleeps_in_a_chunk", f"{WAITED}{CHUNK}{FOR_RANK_1}in microbatch 1, forward of unit layers.2{LIMIT}", ranks=2
    ),
    "computes before it publishes": Fault(
        "computes_between_a_and_b",
        f"{WAITED}synchronizing at parameters_published{FOR_RANK_1}{AFTER_A}{LIMIT}",
        ranks=2,
    ),
    "never frees its tickets": Fault(
        "never_frees_its_tickets", f"{WAITED}freeing the ticket counters{FOR_RANK_1}.*{LIMIT}", ranks=2
    ),
    # A fetch or a push that does not complete names the owners.
    "fetch hangs": Fault("hangs fetch", f"{WAITED}fetching unit 2: {OWNERS}{LIMIT}"),
    "push hangs": Fault("hangs push", f"{WAITED}accumulating the gradient of unit 2: {OWNERS}{LIMIT}"),
    "fetcher of a node hangs": Fault("fetches_for_its_node sleeps", f"{FETCHED_FOR_NODE}{LIMIT}"),
    # The other rank of its island is late, too, since it waits.
    "sleeps on an island": Fault(
        "sleeps_on_an_island",
        of_islands("waiting for the other ranks of island 0", A, f"{ON_ISLAND}{FORWARD}", WAITS_ON_0),
        ranks=4,
    ),
    "sleeps before a merge": Fault(
        "sleeps_before_a_merge",
        of_islands(
            "waiting for other islands", "synchronizing the ranks of an island", ON_ISLAND + AFTER_A, WAITS_ON_1
        ),
        ranks=4,
    ),
    "never answers": Fault("never_answers", says=(LATE_AT_PUSH,), ranks=2, timeout_s=2, within_s=30),
    "raises": Fault("raises", says=("rank 1 failed", TRACEBACK), ranks=2, timeout_s=15, within_s=30),
    "raises while it fetches ahead": Fault(
        "fetches_ahead", says=("rank 1 failed", TRACEBACK), ranks=2, timeout_s=20, within_s=30
    ),
    **{
        f"its {thread} thread fails": Fault(
            f"fails_in_a_thread {thread}",
            says=(f"rank {ranks - 1} failed in its thread odc_mpi-{thread}:", TRACEBACK),
            ranks=ranks,
            timeout_s=100,
            within_s=25,
        )
        for thread, ranks in (("watchdog", 1), ("status", 2), ("progress", 2))
    },
}
QUICK = {"sleeps in a forward", "never answers", "raises"}
#: Whose outcome does not depend on the MPI library.
ANY_LIBRARY = {"sleeps in a chunk", "computes before it publishes", "raises while it fetches ahead"}
ANY_LIBRARY |= {name for name in FAULTS if name.endswith("thread fails")}


def marked(name):
    marks = [pytest.mark.quick] * (name in QUICK) + [pytest.mark.library] * (name not in ANY_LIBRARY)
    return pytest.param(FAULTS[name], id=name, marks=marks)


@pytest.fixture(autouse=True)
def shared_memory_stays():
    """Check that nothing new is in /dev/shm, but what other programs use there."""
    before = set(Path("/dev/shm").iterdir())
    yield
    assert wait_until(lambda: not left_behind(before)), left_behind(before)


@pytest.mark.parametrize("fault", [marked(name) for name in FAULTS])
def test_a_fault_is_named_with_its_rank(tmp_path, fault):
    fault.check(fault.start(tmp_path))


@pytest.mark.library
def test_a_stopped_rank(tmp_path):
    late = "it waits for rank 2 on \\S+, " + LAST_SEEN
    fault = Fault("goes_on", f"{WAITED}.*{late}(?:{ACTIVITIES}) .*{NO_SIGN}{AND_ANOTHER}{LIMIT}")
    job = fault.start(tmp_path)
    job.wait_for("training")
    os.kill(job.ranks()[2], signal.SIGSTOP)
    fault.check(job)


@pytest.mark.library
def test_a_killed_rank(tmp_path):
    fault = Fault("goes_on", within_s=15)
    job = fault.start(tmp_path)
    job.wait_for("training")
    os.kill(job.ranks()[0], signal.SIGKILL)
    fault.check(job)


#: The process that the launcher starts and watches.
OUTLIVES_ITS_RANK = """
import subprocess, sys, time
subprocess.run([sys.executable, *sys.argv[1:]], close_fds=False)
time.sleep(60)
"""


@pytest.mark.library
def test_a_rank_killed_while_it_fetches_for_its_node(tmp_path):
    """The launcher does not notice it here, so the rank that waits for the fetch must."""
    fault = Fault("fetches_for_its_node dies", f"{FETCHED_FOR_NODE}{NO_SIGN}{LIMIT}")
    fault.check(fault.start(tmp_path, "-c", OUTLIVES_ITS_RANK))


@pytest.mark.library
@pytest.mark.quick
def test_a_rank_that_leaves_is_noticed_at_once(tmp_path):
    left = rf"rank 1 on \S+ has left while others wait for it: rank [02] on \S+, {LAST_SEEN}{A}"
    fault = Fault("leaves", left, seen_s=(0.0, 10.0))
    done, lines = fault.check(fault.start(tmp_path))
    assert len(lines) == 1 and done.code == 1


def test_ranks_with_the_same_error_print_one_traceback(tmp_path):
    fault = Fault("raises all", says=("rank 0 failed", TRACEBACK), ranks=2, timeout_s=15)
    done, _ = fault.check(fault.start(tmp_path))
    assert done.err.count("Traceback") == 1


def test_a_thread_of_the_user_s_that_ends_does_not_end_the_job(tmp_path):
    done = finish(Fault("fails_in_a_thread_of_its_own", ranks=2, timeout_s=20).start(tmp_path))
    assert done.code == 0, done.err
    assert done.out.count("fine") == 2
    assert done.err.count('raise KeyError("my own mistake")') == 2


def test_leaving_while_a_unit_is_fetched_ahead(tmp_path):
    """The thread ends before MPI does."""
    done = finish(Fault("fetches_ahead 3", ranks=1, timeout_s=20).start(tmp_path))
    assert done.code == 3 and not done.err.count("Traceback"), done.err


@pytest.mark.library
def test_ranks_end_by_themselves_where_their_launcher_does_not_answer(tmp_path):
    """MPI_Abort asks the launcher to end all ranks: one that is stuck would leave them waiting forever."""
    job = Fault(f"stops_its_launcher {os.getpid()}", ranks=2).start(tmp_path)
    stopping, ranks = tmp_path / "stopping", {}

    def both_are_known():
        ranks.update(job.ranks())
        return len(ranks) == 2 and stopping.exists() and stopping.read_text()

    job.wait_until(both_are_known)
    try:
        assert wait_until(lambda: not any(map(is_running, ranks.values())), 50)
    finally:
        for process in map(int, stopping.read_text().split()):
            os.kill(process, signal.SIGCONT)
    assert finish(job).code != 0  # what was said is lost where the launcher was to pass it on


@pytest.mark.library
def test_a_point_that_one_rank_leaves_out_is_named(tmp_path):
    """The others' numbers must not be taken for the norm: the run ends at the deadline instead of going wrong."""
    says = ("synchronizing at", "no rank is late, but in another collective is rank")
    fault = Fault("leaves_out_a_point", says=says, ranks=2)
    done, _ = fault.check(fault.start(tmp_path))
    assert "passed 1" not in done.out


@pytest.mark.library
@pytest.mark.quick
def test_a_launcher_of_another_mpi_is_noticed():
    text = "from odc_mpi import World\nWorld()\n"
    done = launch(0, "-c", text, OMPI_COMM_WORLD_SIZE=4, MPI4PY_RC_INITIALIZE="1")
    assert done.code != 0
    assert "the launcher started 4 processes" in done.err

"""Deadlines of a rank and of all ranks, and the progress of a job."""

import json
import threading
import time

import pytest

from odc_mpi.runtime import job as job_module
from odc_mpi.runtime.deadline import Watchdog
from odc_mpi.runtime.job import Job, Progress
from odc_mpi.runtime.lateness import PendingWait, Status
from odc_mpi.runtime.status import PAGE_BYTES, StatusPage, nearby_ranks


class Calls:
    def __init__(self):
        self.seen = []
        self.called = threading.Event()

    def __call__(self, what, waited_s):
        self.seen.append(what)
        self.called.set()
        return 0.0


def test_a_deadline_is_extended_as_long_as_the_callback_says():
    waited = []
    is_over = threading.Event()

    def on_expiry(wait, waited_s):
        waited.append(waited_s)
        if len(waited) < 3:
            return 0.1
        is_over.set()
        return 0.0

    watchdog = Watchdog(0.1, on_expiry)
    with watchdog.watch("generating"):
        assert is_over.wait(10.0)
    watchdog._thread.join(5.0)
    assert not watchdog._thread.is_alive()
    assert len(waited) == 3 and all(seconds > 0.1 * i for i, seconds in enumerate(waited, start=1))


def test_a_wait_that_ended_is_forgotten():
    calls = Calls()
    watchdog = Watchdog(0.3, calls)
    for _ in range(6):
        with watchdog.watch("short"):
            time.sleep(0.1)
    with pytest.raises(ZeroDivisionError), watchdog.watch("failed"):
        raise ZeroDivisionError
    time.sleep(0.5)
    assert calls.seen == [] and watchdog._waits == {}
    watchdog.close()


def test_of_nested_waits_the_late_one_is_named():
    calls, deadline = Calls(), time.monotonic() + 10.0
    watchdog = Watchdog(0.5, calls)

    def busy():
        while not calls.called.is_set() and time.monotonic() < deadline:
            with watchdog.watch("inner"):
                calls.called.wait(0.002)

    threads = [threading.Thread(target=busy, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    with watchdog.watch("stuck"):
        busy()
    for thread in threads:
        thread.join(5.0)
    assert calls.seen == ["stuck"] and watchdog._waits == {}


def test_a_closed_one_is_silent():
    calls = Calls()
    watchdog = Watchdog(0.2, calls)
    watchdog.close()
    watchdog.close()
    with watchdog.watch("long"):
        watchdog._thread.join(5.0)
        assert not watchdog._thread.is_alive()
        time.sleep(0.3)
    assert calls.seen == []


def test_heartbeats_continue_while_it_waits_and_while_not():
    polls = []
    watchdog = Watchdog(0.5, Calls(), lambda: polls.append(time.monotonic()))
    time.sleep(0.4)
    with watchdog.watch("short"):
        time.sleep(0.4)
    assert len(polls) >= 4
    watchdog.close()
    watchdog._thread.join(5.0)
    assert not watchdog._thread.is_alive()


SIZE = 1024


class Status1024:
    """The status of 1,024 ranks, of which those in `aborting` have announced it. Rank 1023 is late."""

    def __init__(self, rank, aborting):
        self.page = StatusPage(memoryview(bytearray(PAGE_BYTES)))
        self.others = [other for other in range(SIZE) if other != rank]
        self.nearby = nearby_ranks(rank, SIZE)
        self.aborting, self.num_read = aborting, 0

    def read(self, ranks):
        peers = {}
        for rank in ranks:
            self.num_read += 1
            peers[rank] = Status("x", 0, 6 if rank == SIZE - 1 else 7, aborting=rank in self.aborting)
        return peers


class AbortedError(Exception):
    pass


def expire(monkeypatch, rank, aborting, wait):
    pauses = []

    def abort(message):
        raise AbortedError(message)

    monkeypatch.setattr(job_module, "abort", abort)
    monkeypatch.setattr(job_module, "install_excepthooks", lambda _: None)
    job = Job(60.0, "comm.timeout_s")
    job.watchdog.close()
    status = Status1024(rank, aborting)
    job.rank, job.status, job.locations = rank, status, ["host"] * SIZE
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(AbortedError) as caught:
        job._expired(wait, 60.0)
    return status, str(caught.value), pauses


def test_the_lowest_rank_reads_all(monkeypatch, tmp_path):
    monkeypatch.setenv("ODC_MPI_FAILURE_FILE", str(tmp_path / "failure.json"))
    status, message, _ = expire(monkeypatch, 0, range(SIZE), PendingWait("synchronizing", collective=7))
    assert "it waits for rank 1023 on host" in message
    report = json.loads((tmp_path / "failure.json").read_text())
    assert (report["rank"], report["host"], report["activity"]) == (1023, "host", "x")
    assert report["error"].startswith("rank 0 waited more than 60 s while synchronizing") and not report["final"]
    assert 2 * (SIZE - 1) <= status.num_read < 2.2 * SIZE


def test_the_others_leave_it_to_that_rank_at_first(monkeypatch):
    _, _, pauses = expire(monkeypatch, 700, range(SIZE), PendingWait("synchronizing", collective=7))
    assert pauses[1] == job_module.ABORT_DELAY_S, "before it reads more than a few"


def test_a_fetch_reads_the_owners_only(monkeypatch):
    status, message, _ = expire(monkeypatch, 700, range(0), PendingWait("fetching", owners=(3, 700, 900)))
    assert "it waits for rank 3 on host" in message and "rank 900" in message
    assert status.num_read < 100


def test_all_tasks_run_and_return_if_any_made_progress():
    progress, calls = Progress(), []

    def task(name, found):
        calls.append(name)
        return found

    assert not progress.run_tasks()
    first, second = (lambda: task("first", True)), (lambda: task("second", False))
    progress.add(first)
    progress.add(second)
    assert progress.run_tasks() and calls == ["first", "second"]
    progress.remove(first)
    assert not progress.run_tasks() and calls[2:] == ["second"]


def test_one_thread_at_a_time_and_none_after_removal():
    progress, begun, go_on = Progress(), threading.Event(), threading.Event()

    def task():
        begun.set()
        return go_on.wait(10)

    progress.add(task)
    server = threading.Thread(target=progress.run_tasks)
    server.start()
    assert begun.wait(10)
    assert not progress.run_tasks(), "another thread is at it"
    remover = threading.Thread(target=progress.remove, args=(task,))
    remover.start()
    assert remover.is_alive(), "the task still runs"
    go_on.set()
    for thread in (server, remover):
        thread.join(10)
    begun.clear()
    assert not progress.run_tasks() and not begun.is_set()

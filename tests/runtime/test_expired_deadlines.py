"""Which ranks read the status of all others when deadlines expire together."""

import time

import pytest

from odc_mpi.runtime import job as job_module
from odc_mpi.runtime.job import Job
from odc_mpi.runtime.lateness import PendingWait, Status
from odc_mpi.runtime.status import PAGE_BYTES, StatusPage, nearby_ranks

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


def test_the_lowest_rank_reads_all(monkeypatch):
    status, message, _ = expire(monkeypatch, 0, range(SIZE), PendingWait("synchronizing", collective=7))
    assert "it waits for rank 1023 on host" in message
    assert 2 * (SIZE - 1) <= status.num_read < 2.2 * SIZE


def test_the_others_leave_it_to_that_rank_at_first(monkeypatch):
    _, _, pauses = expire(monkeypatch, 700, range(SIZE), PendingWait("synchronizing", collective=7))
    assert pauses[1] == job_module.ABORT_DELAY_S, "before it reads more than a few"


def test_a_fetch_reads_the_owners_only(monkeypatch):
    status, message, _ = expire(monkeypatch, 700, range(0), PendingWait("fetching", owners=(3, 700, 900)))
    assert "it waits for rank 3 on host" in message and "rank 900" in message
    assert status.num_read < 100

import threading
import time
from dataclasses import replace

import pytest

from odc_mpi.runtime import status as status_module
from odc_mpi.runtime.status import (
    MAX_REQUESTS,
    MAX_TEXT_BYTES,
    PAGE_BYTES,
    SLOT_BYTES,
    PageReader,
    StatusPage,
    nearby_ranks,
    read_page,
)


@pytest.fixture
def memory():
    return bytearray(PAGE_BYTES)


@pytest.fixture
def page(memory):
    return StatusPage(memoryview(memory))


def read(memory):
    status = read_page(bytes(memory))
    assert status is not None
    return status


def test_a_sign_of_life_changes_only_the_number(page, memory):
    page.write("forward of unit x", 3)
    output = read(memory)
    page.heartbeat()
    assert read(memory).heartbeat_number == output.heartbeat_number + 1
    page.announce_abort()
    assert read(memory) == replace(output, aborting=True, heartbeat_number=output.heartbeat_number + 2)
    assert (output.what, output.microbatch) == ("forward of unit x", 3)
    page.finalizing = True
    page.heartbeat()
    assert read(memory).finalizing


@pytest.mark.parametrize("pad", range(4))
def test_a_long_text_is_cut_between_characters(page, memory, pad):
    text = "x" * pad + "\N{ROCKET}" * 200
    page.write(text)
    what = read(memory).what
    assert text.startswith(what)
    assert MAX_TEXT_BYTES - 4 < len(what.encode()) <= MAX_TEXT_BYTES


@pytest.mark.parametrize("num_new_bytes", range(1, 100, 7))
def test_a_writer_that_is_stopped_within_a_slot_leaves_the_one_before(page, memory, num_new_bytes):
    """As much of the next record as was stored when the process was stopped."""
    for number in range(4):
        page.write(f"forward of unit layers.{number}, which has a rather long name to be cut in its middle", number)
    before = bytes(memory)
    page.write("backward of unit layers.4, which has another long name to be cut at any place in it", 4)
    after = bytes(memory)
    start = 0 if before[:SLOT_BYTES] != after[:SLOT_BYTES] else SLOT_BYTES
    torn = before[:start] + after[start : start + num_new_bytes] + before[start + num_new_bytes :]
    status = read_page(torn)
    assert status is not None and status.microbatch == 3
    status = read_page(after)
    assert status is not None and status.microbatch == 4


def test_two_torn_slots_have_no_status(page, memory):
    for number in range(2):
        page.write(f"number {number}")
    for slot in (0, SLOT_BYTES):
        memory[slot + 20] ^= 1
    assert read_page(bytes(memory)) is None


def test_threads_write_complete_records(page, memory):
    stop = threading.Event()

    def write(thread):
        while not stop.is_set():
            page.write(f"{thread} " * 20, thread)

    threads = [threading.Thread(target=write, args=(i,), daemon=True) for i in range(3)]
    page.write("0 " * 20, 0)
    for thread in threads:
        thread.start()
    seen = [read_page(bytes(memory)) for _ in range(2000)]
    stop.set()
    for thread in threads:
        thread.join(5.0)
    # No two threads in one slot: a reader in the same process, under the same lock of Python, finds valid pages.
    assert all(status and status.what == f"{status.microbatch} " * 20 for status in seen)
    assert page._number == read(memory).heartbeat_number


def test_a_detached_page_writes_nowhere(page, memory):
    page.write("before")
    page.detach()
    page.write("after")
    assert read(memory).what == "before"


class Pages:
    """The pages of many ranks, some of which are silent. The requests that are answered need two tests."""

    def __init__(self, not_answering=()):
        self.not_answering = set(not_answering)
        self.incomplete = set()
        self.largest = 0

    def start(self, page, rank):
        assert rank not in self.incomplete, "a second request beside one that is incomplete"
        self.incomplete.add(rank)
        self.largest = max(self.largest, len(self.incomplete))
        StatusPage(memoryview(page)).write(f"forward of unit {rank}")
        return Request(self, rank)


class Request:
    def __init__(self, pages, rank):
        self.pages, self.rank, self.tests = pages, rank, 0

    def Test(self):  # noqa: N802 - the name in MPI
        self.tests += 1
        if self.tests < 2 or self.rank in self.pages.not_answering:
            return False
        self.pages.incomplete.discard(self.rank)
        return True


def read_all(reader, ranks):
    status = dict.fromkeys(ranks)
    reader.read(status, time.monotonic() + 20.0)
    return status


def test_requests_in_flight_are_bounded(monkeypatch):
    """Also over several readings, since a request to a silent rank stays incomplete."""
    monkeypatch.setattr(status_module, "READ_GRACE_S", 0.3)
    pages = Pages(not_answering=range(7, 1024, 40))
    reader = PageReader(pages.start)
    for _ in range(3):
        status = read_all(reader, range(1024))
        assert {rank for rank, found in status.items() if found is None} == pages.not_answering
        assert all(found.what == f"forward of unit {rank}" for rank, found in status.items() if found)
    assert pages.largest == MAX_REQUESTS
    pages.not_answering.clear()
    assert None not in read_all(reader, range(1024)).values(), "a rank that answers late is read the next time"


def test_if_too_many_ranks_are_silent_the_reading_ends(monkeypatch):
    monkeypatch.setattr(status_module, "READ_GRACE_S", 0.1)
    reader = PageReader(Pages(not_answering=range(100)).start)
    assert set(read_all(reader, range(300)).values()) == {None}


@pytest.mark.parametrize("size", [1, 2, 5, 64, 1024])
def test_a_rank_reads_few_others(size):
    nearby = {rank: nearby_ranks(rank, size) for rank in range(size)}
    for rank, others in nearby.items():
        assert rank not in others and len(set(others)) == len(others) == min(size - 1, MAX_REQUESTS)
        assert size == 1 or (rank - 1) % size in others
        assert rank == 0 or 0 in others

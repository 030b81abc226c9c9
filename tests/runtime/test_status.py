import threading
import time

import pytest

from odc_mpi.runtime.lateness import Status
from odc_mpi.runtime.status import MAX_TEXT_BYTES, PAGE_BYTES, SLOT_BYTES, StatusPage, read_page


@pytest.fixture
def memory() -> bytearray:
    return bytearray(PAGE_BYTES)


@pytest.fixture
def page(memory: bytearray) -> StatusPage:
    return StatusPage(memoryview(memory))


def read(memory: bytearray) -> Status:
    status = read_page(bytes(memory))
    assert status is not None
    return status


def test_written_files_are_read(page: StatusPage, memory: bytearray) -> None:
    before = time.time()
    page.write("forward of unit layers.3", 2)
    status = read(memory)
    assert (status.what, status.microbatch, status.num_collectives) == ("forward of unit layers.3", 2, 0)
    assert before <= status.published_at <= time.time()
    assert not status.finalizing and not status.aborting
    page.write("short")
    assert (read(memory).what, read(memory).microbatch) == ("short", 0)


def test_collectives_are_counted(page: StatusPage, memory: bytearray) -> None:
    page.write("forward of unit x", 3)
    assert [
        page.enter_collective("first collective"),
        page.enter_collective("second collective"),
    ] == [1, 2]
    assert read(memory).num_collectives == 2
    assert (read(memory).what, read(memory).microbatch) == ("second collective", 0)
    page.write("after")
    assert read(memory).num_collectives == 2


def test_a_sign_of_life_changes_only_the_number(page: StatusPage, memory: bytearray) -> None:
    page.write("forward of unit x", 3)
    output = read(memory)
    page.heartbeat()
    assert read(memory).heartbeat_number == output.heartbeat_number + 1
    page.announce_abort()
    assert read(memory) == Status(
        "forward of unit x", 3, 0, False, True, False, output.published_at, output.heartbeat_number + 2
    )
    page.finalizing = True
    page.heartbeat()
    assert read(memory).finalizing


def test_an_empty_page_has_no_status(memory: bytearray) -> None:
    assert read_page(bytes(memory)) is None


@pytest.mark.parametrize("pad", range(4))
def test_a_long_text_is_cut_between_characters(page: StatusPage, memory: bytearray, pad: int) -> None:
    text = "x" * pad + "\N{ROCKET}" * 200
    page.write(text)
    what = read(memory).what
    assert text.startswith(what)
    assert MAX_TEXT_BYTES - 4 < len(what.encode()) <= MAX_TEXT_BYTES


@pytest.mark.parametrize("cut", range(1, 100, 7))
def test_a_writer_that_is_stopped_within_a_slot_leaves_the_one_before(
    page: StatusPage, memory: bytearray, cut: int
) -> None:
    """As much of the next record as was stored when the process was stopped."""
    for number in range(4):
        page.write(f"forward of unit layers.{number}, which has a rather long name to be cut in its middle", number)
    before = bytes(memory)
    page.write("backward of unit layers.4, which has another long name to be cut at any place in it", 4)
    after = bytes(memory)
    start = 0 if before[:SLOT_BYTES] != after[:SLOT_BYTES] else SLOT_BYTES
    torn = before[:start] + after[start : start + cut] + before[start + cut :]
    status = read_page(torn)
    assert status is not None and status.microbatch == 3
    status = read_page(after)
    assert status is not None and status.microbatch == 4


def test_two_torn_slots_have_no_status(page: StatusPage, memory: bytearray) -> None:
    for number in range(2):
        page.write(f"number {number}")
    for slot in (0, SLOT_BYTES):
        memory[slot + 20] ^= 1
    assert read_page(bytes(memory)) is None


def test_threads_write_complete_records(page: StatusPage, memory: bytearray) -> None:
    stop = threading.Event()

    def write(thread: int) -> None:
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
    whole = [status for status in seen if status is not None]
    # No two threads in one slot: a reader in the same process, under the same lock of Python, finds valid pages.
    assert len(whole) == len(seen)
    assert all(status.what == f"{status.microbatch} " * 20 for status in whole)
    assert page._number == read(memory).heartbeat_number


def test_a_detached_page_writes_nowhere(page: StatusPage, memory: bytearray) -> None:
    page.write("before")
    page.detach()
    page.write("after")
    assert read(memory).what == "before"

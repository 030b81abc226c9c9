"""Status of all ranks in a window, which ranks read after a missed deadline or an error, and when they finalize.

Each rank has a page in the window, which it writes with plain stores and other ranks read with MPI_Rget. In a large
job, most ranks read only some of the pages (`nearby_ranks`). Within a node, a rank's page can be read even if the rank
computes or is stopped. Over a network without one-sided hardware, a page can be read only while its rank is in an MPI
call. Therefore, a background thread of each rank calls MPI periodically; over such a network, a stopped rank does not
answer.

Note: torn pages
    A page has two slots (halves), which are written alternately, each with a number and a checksum. A reader uses the
    valid slot with the higher number. If a writer is stopped while writing one slot, the other slot remains valid.
    Unlike a sequence lock, this does not depend on the order of stores.
"""

import queue
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
from mpi4py import MPI

from odc_mpi.runtime.lateness import Status
from odc_mpi.runtime.library import has_thread_multiple, memory_model

#: Size of a slot, which is half a page, in bytes.
SLOT_BYTES = 256
PAGE_BYTES = 2 * SLOT_BYTES
#: Content of a slot: checksum; fields of `Status` in their order, without the first and the last; length of the text.
_CHECKSUM = struct.Struct("<I")
_HEAD = struct.Struct("<II??dQB")
MAX_TEXT_BYTES = SLOT_BYTES - _CHECKSUM.size - _HEAD.size
#: Time between polls by the background thread, in seconds, and number of MPI calls per poll. The calls let MPI make
#: progress on a computing rank: they suffice for other ranks to read its page, but are too few to slow it down.
POLL_EVERY_S, NUM_POLLS = 0.5, 3
#: Time without an answer from any rank after which a reading ends, in seconds. A dead or stopped host never answers.
READ_GRACE_S = 2.0
#: Maximum number of reads in flight. Open MPI 5 with UCX aborts at the 255th request (open-mpi/ompi#14192).
MAX_REQUESTS = 64
#: Number of ranks, starting with rank 0, that connect to all ranks at startup and can later read any rank's status.
NUM_FIRST_RANKS = 8


class StatusPage:
    """Status page of this rank in `memory`, uint8 `[PAGE_BYTES]`. Thread-safe.

    The attributes have the same meaning as those of `Status`. A changed attribute is published by the next write.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._lock = threading.RLock()
        self._number = 0
        self._last = ("", 0, 0.0)
        self.num_collectives = 0
        self.finalizing = False
        self.aborting = False

    @property
    def what(self) -> str:
        """Activity that this rank last published."""
        return self._last[0]

    def write(self, what: str, microbatch: int = 0) -> None:
        """Publish this rank's activity (see `World.set_status`)."""
        with self._lock:
            self._last = what, microbatch, time.time()
            self.heartbeat()

    def enter_collective(self, what: str) -> int:
        """Publish that this rank has arrived at a collective, and return the collective's number, starting at 1."""
        with self._lock:
            self.num_collectives += 1
            self.write(what)
            return self.num_collectives

    def announce_abort(self, aborting: bool = True) -> None:
        """Publish that this rank is (or, with False, no longer is) about to abort the job. Keeps the activity."""
        with self._lock:
            self.aborting = aborting
            self.heartbeat()

    def heartbeat(self) -> None:
        """Publish the status again with a new `heartbeat_number`."""
        with self._lock:
            self._number += 1
            what, microbatch, published_at = self._last
            text = what.encode()[:MAX_TEXT_BYTES]
            fields = (microbatch, self.num_collectives, self.finalizing, self.aborting, published_at, self._number)
            record = _HEAD.pack(*fields, len(text)) + text
            start = self._number % 2 * SLOT_BYTES
            self._memory[start : start + _CHECKSUM.size + len(record)] = _CHECKSUM.pack(zlib.crc32(record)) + record

    def detach(self) -> None:
        """Detach the page from the window memory. Later writes are not visible to other ranks."""
        with self._lock:
            self._memory = memoryview(bytearray(PAGE_BYTES))


def read_page(page: bytes) -> Status | None:
    """Decode the status in a page. Return None if both slots are invalid because they changed while being read."""
    slots = [_read_slot(page[start : start + SLOT_BYTES]) for start in (0, SLOT_BYTES)]
    return max((slot for slot in slots if slot is not None), key=lambda status: status.heartbeat_number, default=None)


def _read_slot(slot: bytes) -> Status | None:
    *fields, length = _HEAD.unpack_from(slot, _CHECKSUM.size)
    record = slot[_CHECKSUM.size : _CHECKSUM.size + _HEAD.size + length]
    if zlib.crc32(record) != _CHECKSUM.unpack_from(slot)[0]:
        return None
    # A character at which the text was truncated is dropped.
    text = record[_HEAD.size :].decode(errors="ignore")
    return Status(text, *fields)


def nearby_ranks(rank: int, size: int) -> list[int]:
    """Return up to 64 other ranks whose status `rank` reads: the first 8, then the next lower ones, wrapping around."""
    first = range(min(NUM_FIRST_RANKS, size))
    below = ((rank - distance) % size for distance in range(1, size))
    return [other for other in dict.fromkeys([*first, *below]) if other != rank][:MAX_REQUESTS]


class PageReader:
    """Reader for the pages of other ranks, with at most `MAX_REQUESTS` requests in flight. Not thread-safe.

    `start` is a function that starts reading a rank's page into a buffer, uint8 `[PAGE_BYTES]`. One-sided.
    """

    def __init__(self, start: Callable[[np.ndarray, int], MPI.Request]) -> None:
        self._start = start
        # Requests to silent ranks stay here after a reading, since MPI may still write to their buffers.
        self._incomplete: dict[int, tuple[MPI.Request, np.ndarray]] = {}

    def read(self, status: dict[int, Status | None], deadline: float) -> None:
        """Set the value of each rank in `status` to the status that the rank has published. One-sided.

        Ranks that do not answer before `deadline`, a time on the monotonic clock, keep their previous values. Reading
        ends earlier if no rank answers for `READ_GRACE_S` seconds.
        """
        for rank in self._completed():
            del self._incomplete[rank]  # a page of an earlier reading
        unread = deque(rank for rank in status if rank not in self._incomplete)
        num_missing = len(status)
        answered_at = time.monotonic()
        while num_missing and time.monotonic() < min(deadline, answered_at + READ_GRACE_S):
            while unread and len(self._incomplete) < MAX_REQUESTS:
                page = np.empty(PAGE_BYTES, dtype=np.uint8)
                rank = unread.popleft()
                self._incomplete[rank] = self._start(page, rank), page
            for rank in self._completed():
                _, page = self._incomplete.pop(rank)
                if rank in status and (page_status := read_page(page.tobytes())) is None:
                    unread.append(rank)  # a torn page
                elif rank in status:
                    status[rank], answered_at = page_status, time.monotonic()
                    num_missing -= 1
            time.sleep(100e-6)

    def _completed(self) -> list[int]:
        return [rank for rank, (request, _) in self._incomplete.items() if request.Test()]


class StatusWindow:
    """Window with the status pages of all ranks. Construction is collective.

    Attributes:
        memory_model: Memory model of this window, and of all other windows of the MPI library.
        prepare: Function that the background thread calls before it calls MPI.
        background_progress: True if the background thread calls MPI periodically, so that other ranks can read the page
            over any network.
        nearby: Ranks to read if the status of a few ranks is enough (see `nearby_ranks`). `others` are all other ranks.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.background_progress = True
        self.prepare: Callable[[], None] = lambda: None
        self._comm = comm
        self._rank, size = comm.Get_rank(), comm.Get_size()
        self.others = [rank for rank in range(size) if rank != self._rank]
        self.nearby = nearby_ranks(self._rank, size)
        info = MPI.Info.Create({"same_size": "true", "same_disp_unit": "true"})
        self._win: MPI.Win | None = MPI.Win.Allocate(PAGE_BYTES, 1, info, comm)
        info.Free()
        self.memory_model = memory_model(self._win)
        self._win.Lock_all(MPI.MODE_NOCHECK)
        self.page = StatusPage(memoryview(self._win.tomemory()))  # type: ignore[arg-type]
        self.page.write("starting up")
        self._win.Sync()
        self._reader = PageReader(self._start_reading)
        # Read in a separate thread: an MPI call for a dead host may not return.
        self._readings: queue.SimpleQueue[tuple[dict[int, Status | None], float, threading.Event] | None]
        self._readings = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="odc_mpi-status", daemon=True)
        # Otherwise only the thread that waits could call MPI at that moment, and no page can be read.
        if has_thread_multiple():
            self._thread.start()
        # The first Get from a peer opens a connection, which must exist before the peer fails. Only the first ranks
        # open connections to all other ranks, and can later read the status of all.
        comm.Barrier()
        self.read(self.others if self._rank < NUM_FIRST_RANKS else self.nearby)
        comm.Barrier()

    def read(self, ranks: Iterable[int]) -> dict[int, Status | None]:
        """Return the status of each of the given ranks, or None for a rank that does not answer in time. One-sided.

        Without MPI_THREAD_MULTIPLE, the status of every rank is None.
        """
        status: dict[int, Status | None] = dict.fromkeys(ranks)
        limit_s = READ_GRACE_S * -(-len(status) // MAX_REQUESTS)
        is_done = threading.Event()
        if self._thread.is_alive():
            self._readings.put((status, time.monotonic() + limit_s, is_done))
            is_done.wait(limit_s + 0.5)
        return dict(status)

    def free(self) -> None:
        """Free the window and detach `page`. Collective. Idempotent."""
        if self._win is None:
            return
        self.page.detach()
        self._readings.put(None)
        if self._thread.is_alive():
            self._thread.join()
        self._win.Unlock_all()
        self._win.Free()
        self._win = None

    def _run(self) -> None:
        while True:
            try:
                reading = self._readings.get(timeout=POLL_EVERY_S)
            except queue.Empty:
                if self.background_progress:
                    self.prepare()
                    self._poll()
                continue
            if reading is None:
                return
            self.prepare()
            status, deadline, is_done = reading
            self._reader.read(status, deadline)
            is_done.set()

    def _poll(self) -> None:
        """Make MPI progress. Without one-sided hardware, ranks on other hosts can read the page only then."""
        for _ in range(NUM_POLLS):
            self._comm.Iprobe()
            time.sleep(1e-3)

    def _start_reading(self, page: np.ndarray, rank: int) -> MPI.Request:
        assert self._win is not None
        return self._win.Rget([page, MPI.BYTE], rank, (0, PAGE_BYTES, MPI.BYTE))

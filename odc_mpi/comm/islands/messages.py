"""Numbered messages between islands that proceed at different speeds.

The ranks with the same position in their islands, a column, read the messages from each other:

    show      write a message into this rank's own memory, and report it to the other ranks      does not wait
    fetch     start to read the messages that other ranks have shown                             does not wait
    receive   wait until the messages in flight have arrived                                     waits for islands

Each rank has two slots in the window. Message n is in slot n mod 2. A rank overwrites it with message n + 2 only after
it has received message n + 1 of all ranks. Each of these had received message n of all ranks before, so none still
reads the slot. `comm.islands.quorum_window` is a variant that does not wait for all.
"""

from collections.abc import Callable, Collection

import numpy as np
import torch
from mpi4py import MPI

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.islands.reports import Reports
from odc_mpi.comm.windows.rma import Window
from odc_mpi.runtime.deadline import wait_until

#: A message is read in at most `_MAX_PARTS` parts of at least `_MIN_PART_BYTES`. The deadline of a wait applies to each
#: part, so a slow network is not taken for a fault.
_MAX_PARTS, _MIN_PART_BYTES = 64, 1 << 22


class MessageWindow:
    """Window through which islands exchange messages of at most `max_bytes`. Construction is collective.

    `max_bytes` is the same on all ranks of a column.

    Attributes:
        reports: Reports between the ranks of the column.
        decided: Number of the latest message that `receive` has returned. Initially 0.
    """

    def __init__(self, islands: Islands, max_bytes: int) -> None:
        self.island, self.column = islands.island, islands.column
        with self.island.collective("duplicating the communicator"):
            self._island_comm = self.island.comm.Dup()
        self.island.on_close(self._island_comm.Free)
        self.reports = Reports(self.column)
        self._slot_words = -(-max_bytes // 8)
        self._window = self._make_window(2 * self._slot_words)
        self._words = self._window.tensor.numpy()
        self._others = [rank for rank in range(self.column.size) if rank != self.column.rank]
        self.decided = self._number = self._num_parts = 0
        self._received = np.empty((self.column.size, 0), dtype=np.int64)
        self._reads: dict[int, list[MPI.Request]] = {}
        self._is_open = True
        self.column.on_close(self.close)
        # Another rank must not read a slot before this rank has cleared its memory.
        self.column.wait_collective(self.column.comm.Ibarrier(), "clearing the window of islands")

    def start_after(self, number: int) -> None:
        """Let the first message have the number after `number`, on all ranks."""
        self.decided = self._number = number

    def show(self, message: np.ndarray) -> None:
        """Show this rank's next message to other ranks: uint8 `[n]`, with the same n on all ranks. Does not wait."""
        me, reports = self.column.rank, self.reports
        self._number = reports.shown[me] = self.decided + 1
        self._received = np.zeros((self.column.size, -(-message.size // 8)), dtype=np.int64)
        self._received.view(np.uint8)[me, : message.size] = message
        start = self._slot()
        self._words[start : start + self._received.shape[1]] = self._received[me]
        self._window.sync()  # what the report is about is in memory
        self._reads = {}
        reports.have[me] = np.arange(self.column.size) == me
        reports.send(self._audience())

    def fetch(self) -> None:
        """Read reports, and start to read the messages in flight that other ranks have shown. Does not wait."""
        self._hear()
        if self._number == self.decided:
            return
        self._window.sync()
        have = self.reports.have[self.column.rank]
        for rank in self._others:
            if rank not in self._reads and self.reports.shown[rank] >= self._number:
                self._reads[rank] = self._start_read(rank)
                self._num_parts += 1
            elif self._reads.get(rank):
                remaining = [each for each in self._reads[rank] if not each.Test()]
                self._num_parts += len(self._reads[rank]) - len(remaining)
                self._reads[rank] = remaining
                if not remaining:
                    have[rank] = True
                    self._on_arrival()

    def serve(self) -> None:
        """Send this rank's state to islands that ask for it. Only those of a `QuorumWindow` do: collective there."""

    def receive(self) -> tuple[np.ndarray, list[int]]:
        """Wait for the messages in flight.

        Returns:
            The messages of all ranks, uint8 `[ranks, n]`, with n rounded up to a multiple of 8, and the islands whose
            messages to use, in ascending order. Rows of other islands have any content.
        """
        self.column.set_status("waiting for other islands")
        islands: list[int] = []

        def is_complete() -> bool:
            self.fetch()
            islands[:] = self._decide()
            return bool(islands)

        while not islands:
            self._wait_for_progress(is_complete)
        self._close(islands)
        return self._received.view(np.uint8), islands

    def request(self, number: int) -> None:
        """Make `requested` return at least `number` on all ranks, including this one. Does not wait."""
        requested, me = self.reports.requested, self.column.rank
        if number > requested[me]:
            requested[me] = number
            self.reports.send(self._audience())

    def requested(self) -> int:
        """Return the largest number that a rank has requested and that has arrived here, or 0. Does not wait."""
        self._hear()
        return int(self.reports.requested.max())

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Return the values `[n]` of all ranks of the island, `[ranks, n]`. Collective over the island."""
        gathered = np.empty((self.island.size, len(values)), dtype=values.dtype)
        self.island.wait_collective(
            self._island_comm.Iallgather(values, gathered), "synchronizing the ranks of an island"
        )
        return gathered

    def close(self) -> None:
        """Free the window. Collective over all islands. Idempotent. Call this before closing the islands."""
        if self._is_open:
            self._is_open = False
            self.column.cancel_on_close(self.close)
            self.reports.finish()
            with self.column.collective("freeing the window of islands"):
                self._window.flush()
                self._words = np.empty(0)
                self._window.free()

    def _make_window(self, numel: int) -> Window:
        return Window(self.column, numel, torch.int64)

    def _audience(self) -> Collection[int]:
        """Return the ranks that reports go to."""
        return self._others

    def _hear(self) -> None:
        self.reports.receive()

    def _on_arrival(self) -> None:
        """Called when a message of another rank has been received."""

    def _missing(self) -> Collection[int]:
        """Return the ranks for which `receive` waits."""
        return [rank for rank in self._others if not self.reports.have[self.column.rank, rank]]

    def _decide(self) -> list[int]:
        """Return the islands whose messages to use, or an empty list as long as messages are missing."""
        return [] if self._missing() else list(range(self.column.size))

    def _close(self, islands: list[int]) -> None:
        self.decided = self._number

    def _wait_for_progress(self, is_complete: Callable[[], bool]) -> None:
        """Wait until `is_complete` returns True or a part of a message has arrived."""
        num_parts = self._num_parts
        with self.column.deadline("waiting for other islands", self._missing()):
            wait_until(lambda: is_complete() or self._num_parts > num_parts, self.column.progress.poke)

    def _start_read(self, rank: int) -> list[MPI.Request]:
        """Start to read the message in flight of another rank, in parts."""
        row, start = self._received[rank], self._slot()
        part_words = max(_MIN_PART_BYTES // 8, -(-len(row) // _MAX_PARTS))
        return [
            request
            for first in range(0, len(row), part_words)
            for request in self._window.start_get(row[first : first + part_words], rank, start + first)
        ]

    def _slot(self) -> int:
        return self._number % 2 * self._slot_words

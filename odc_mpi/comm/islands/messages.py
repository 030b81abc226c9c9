"""Numbered messages between ranks that proceed at different speeds: those of a column (see `comm.islands.islands`).

    show      write a message into this rank's own memory, and announce it to the other ranks      does not wait
    fetch     start to read the messages that other ranks have announced                           does not wait
    receive   wait until all ranks have announced their message, and read the remaining ones

Each rank has the same parts in the window, in int64 elements:

    [ for each rank, how many messages it has announced | for each rank, the number that it requested | 2 slots ]

Message n is in slot n mod 2. A rank overwrites it with message n + 2 only after it has received message n + 1 of all
ranks. Each of these had received message n of all ranks before, so none still reads the slot.
"""

import numpy as np
import torch
from mpi4py import MPI

from odc_mpi.comm.windows.rma import Window, messages
from odc_mpi.runtime.deadline import wait_until
from odc_mpi.runtime.world import World

#: A message is read in at most `_MAX_PARTS` parts of at least `_MIN_PART_BYTES`. The deadline of a wait applies to each
#: part, so a slow network is not taken for a fault.
_MAX_PARTS, _MIN_PART_BYTES = 64, 1 << 22


class MessageWindow:
    """Window through which the ranks of `column` exchange messages of at most `max_bytes`. Construction is collective.

    `max_bytes` is the same on all ranks.
    """

    def __init__(self, column: World, max_bytes: int) -> None:
        self._column, self._slot_words = column, -(-max_bytes // 8)
        self._others = [rank for rank in range(column.size) if rank != column.rank]
        self._window = Window(column, 2 * (column.size + self._slot_words), torch.int64)
        self._words = self._window.tensor.numpy()
        self._number = self._requested = 0
        self._received = np.empty((column.size, 0), dtype=np.int64)
        self._pending: list[int] = []
        self._reads: list[tuple[int, MPI.Request]] = []
        self._sent: list[np.ndarray] = []
        self._is_open = True
        column.on_close(self.close)
        # Another rank's first announcement must not arrive before this rank has cleared its memory.
        column.wait_collective(column.comm.Ibarrier(), "clearing the window of islands")

    def show(self, message: np.ndarray) -> None:
        """Show this rank's next message to the other ranks: uint8 `[n]`, with the same n on all ranks. One-sided."""
        self._number += 1
        self._received = np.zeros((self._column.size, -(-message.size // 8)), dtype=np.int64)
        self._received.view(np.uint8)[self._column.rank, : message.size] = message
        start = self._slot()
        self._words[start : start + self._received.shape[1]] = self._received[self._column.rank]
        self._pending = list(self._others)
        self._add(self._column.rank, 1)

    def fetch(self) -> None:
        """Start to read the messages that other ranks have announced since the last call. One-sided."""
        self._window.sync()
        announced = [rank for rank in self._pending if self._words[rank] >= self._number]
        num_words = self._received.shape[1]
        part_words = max(_MIN_PART_BYTES // 8, -(-num_words // _MAX_PARTS))
        for rank in announced:
            for first in range(0, num_words, part_words):
                part = self._received[rank, first : first + part_words]
                self._reads += [(rank, each) for each in self._window.start_get(part, rank, self._slot() + first)]
            self._pending.remove(rank)

    def receive(self) -> np.ndarray:
        """Wait for the current messages of all ranks, and return them, uint8 `[ranks, n]`. One-sided.

        Messages are padded to a multiple of 8 bytes.
        """

        def is_complete() -> bool:
            self.fetch()
            return not self._pending

        what = "waiting for other islands"
        self._column.set_status(what)
        with self._column.deadline(what, self._pending):
            self._window.flush()
            wait_until(is_complete, self._column.progress.poke)
        for rank, read in self._reads:
            with self._column.deadline(f"receiving the parameters of island {rank}", [rank]):
                wait_until(read.Test, self._column.progress.run_tasks)
        self._reads, self._sent = [], []
        return self._received.view(np.uint8)

    def request(self, number: int) -> None:
        """Make `requested` return at least `number` on all ranks, including this one. One-sided, and does not wait."""
        if number > self._requested:
            self._add(self._column.size + self._column.rank, number - self._requested)
            self._requested = number

    def requested(self) -> int:
        """Return the largest number that a rank has requested and that has arrived here, or 0. Does not communicate."""
        self._window.sync()
        return max(self._requested, int(self._words[self._column.size : 2 * self._column.size].max()))

    def close(self) -> None:
        """Free the window. Collective. Idempotent. Call this before closing the column."""
        if self._is_open:
            self._is_open = False
            self._column.cancel_on_close(self.close)
            with self._column.collective("freeing the window of islands"):
                self._window.flush()
                self._words = np.empty(0)
                self._window.free()

    def _slot(self) -> int:
        return 2 * self._column.size + self._number % 2 * self._slot_words

    def _add(self, element: int, value: int) -> None:
        """Add `value` to an element in the memory of each other rank."""
        self._window.sync()  # what this announces is in memory
        self._sent.append(np.array([value]))
        for rank in self._others:
            self._window.accumulate_messages(self._sent[-1], messages(rank, element, 1))

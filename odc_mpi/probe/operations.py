"""The one-sided operations that a probe tries, each with a check of its result.

The window holds small whole numbers as float32, so that bytes can be compared and sums are exact, and then one 64-bit
counter. An origin keeps a copy of the expected content of its target's window.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from typing_extensions import override

#: Bytes of the counter, after the numbers.
COUNTER_BYTES = 8


def pattern(num_bytes: int) -> np.ndarray:
    """Return the initial content of a window: numbers that differ from page to page (251 is prime)."""
    numbers = np.resize(np.arange(251, dtype=np.float32), (num_bytes - COUNTER_BYTES) // 4)
    return np.concatenate([numbers.view(np.uint8), np.zeros(COUNTER_BYTES, dtype=np.uint8)])


class Buffer:
    """Memory that operations read or fill, of the host.

    Args:
        values: Initial content, `[n]` uint8.

    Attributes:
        memory: Buffer for MPI; it can be sliced.
    """

    def __init__(self, values: np.ndarray) -> None:
        # Written, not only allocated: fresh pages would be paid for within the first timed operation.
        self.memory: np.ndarray | memoryview = values.copy()

    def fill(self, value: int, num_bytes: int) -> None:
        """Overwrite the first bytes, each with the same value."""
        np.asarray(self.memory)[:num_bytes] = value

    def read(self, num_bytes: int) -> np.ndarray:
        """Return the first bytes."""
        return np.asarray(self.memory)[:num_bytes]


class ProbeLink:
    """An origin's memory and the expected content of one target's window.

    Args:
        win: The window, in units of one byte, locked.
        target: Rank of the target.
        expected: Content of the target's window with the counter, `[n]` uint8; kept up to date. Peerings with the same
            target share the array.
        allocate: Makes the memory that operations read and fill.
        rotation: Number of places by which the numbers to send are turned.
    """

    def __init__(
        self,
        win: MPI.Win,
        target: int,
        expected: np.ndarray,
        allocate: Callable[[np.ndarray], Buffer],
        rotation: int,
    ) -> None:
        self.win, self.target, self.expected = win, target, expected
        first = pattern(expected.size)[: expected.size - COUNTER_BYTES]
        self.values = np.roll(first.view(np.float32)[::-1], rotation).view(np.uint8)
        self.sent, self.received = allocate(self.values), allocate(np.ones(expected.size, dtype=np.uint8))

    def get(self, num_bytes: int) -> None:
        """Read the first bytes of the target's window. One-sided."""
        self.win.Get([self.received.memory[:num_bytes], MPI.BYTE], self.target, (0, num_bytes, MPI.BYTE))
        self.win.Flush(self.target)


class TrialOperation:
    """One operation towards one target."""

    #: Bytes of a small operation.
    small_bytes = 64
    #: Whether the operation is also tried with many bytes.
    grows = True

    def __init__(self, peering: ProbeLink) -> None:
        self.peering = peering
        self.max_bytes = 0

    def run(self, num_bytes: int) -> None:
        """Run the operation once and complete it at the target. One-sided."""
        self.max_bytes = max(self.max_bytes, num_bytes)
        self._run(num_bytes)
        self._update_expected(num_bytes)

    def is_correct(self) -> bool:
        """Read the target's window and compare it with the expected content. One-sided."""
        self.peering.received.fill(255, self.max_bytes)
        self.peering.get(self.max_bytes)
        right = self._has_received()
        # The next operation starts from the actual content, right or wrong.
        self.peering.expected[: self.max_bytes] = self.peering.received.read(self.max_bytes)
        return right

    def _has_received(self) -> bool:
        return np.array_equal(self.peering.received.read(self.max_bytes), self.peering.expected[: self.max_bytes])

    def _run(self, num_bytes: int) -> None:
        raise NotImplementedError

    def _update_expected(self, num_bytes: int) -> None:
        """Bring the copy of the target's window up to date."""


class Get(TrialOperation):
    """Reads the numbers that the target wrote at the start."""

    def _run(self, num_bytes: int) -> None:
        self.peering.get(num_bytes)

    @override
    def is_correct(self) -> bool:
        return self._has_received()


class Put(TrialOperation):
    """Writes the same numbers in another order."""

    def _run(self, num_bytes: int) -> None:
        peering = self.peering
        peering.win.Put([peering.sent.memory[:num_bytes], MPI.BYTE], peering.target, (0, num_bytes, MPI.BYTE))
        peering.win.Flush(peering.target)

    @override
    def is_correct(self) -> bool:
        self.peering.expected[: self.max_bytes] = self.peering.values[: self.max_bytes]
        return super().is_correct()


class Accumulate(TrialOperation):
    """Adds float32 numbers, few and small enough for every sum to be exact."""

    def __init__(self, peering: ProbeLink) -> None:
        super().__init__(peering)
        self._runs: dict[int, int] = {}

    def _run(self, num_bytes: int) -> None:
        peering, place = self.peering, (0, num_bytes // 4, MPI.FLOAT)
        peering.win.Accumulate([peering.sent.memory[:num_bytes], MPI.FLOAT], peering.target, place, MPI.SUM)
        peering.win.Flush(peering.target)

    def _update_expected(self, num_bytes: int) -> None:
        self._runs[num_bytes] = self._runs.get(num_bytes, 0) + 1

    @override
    def is_correct(self) -> bool:
        for num_bytes, runs in self._runs.items():
            values = self.peering.values[:num_bytes].view(np.float32)
            self.peering.expected[:num_bytes].view(np.float32)[:] += runs * values
        return super().is_correct()


class FetchAndOp(TrialOperation):
    """Draws numbers from the counter."""

    small_bytes = COUNTER_BYTES
    grows = False

    def __init__(self, peering: ProbeLink) -> None:
        super().__init__(peering)
        self._one, self._fetched = np.ones(1, dtype=np.int64), np.empty(1, dtype=np.int64)
        self._place = peering.expected.size - COUNTER_BYTES
        self._count, self._right = 0, True

    def _run(self, num_bytes: int) -> None:
        win, target = self.peering.win, self.peering.target
        win.Fetch_and_op([self._one, MPI.INT64_T], [self._fetched, MPI.INT64_T], target, self._place, MPI.SUM)
        win.Flush(target)

    def _update_expected(self, num_bytes: int) -> None:
        self._right = self._right and self._fetched[0] == self._count
        self._count += 1

    @override
    def is_correct(self) -> bool:
        return bool(self._right)


#: The operations by their names in a report.
BY_NAME: dict[str, Any] = {"get": Get, "put": Put, "accumulate": Accumulate, "fetch_and_op": FetchAndOp}

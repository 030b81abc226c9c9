"""One-sided operations that a probe tries, with checks of their results.

A target's window contains float32 numbers followed by a 64-bit counter. The numbers are small integers whose sums are
exact, so results are compared bitwise with the expected content, which the origin keeps.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from typing_extensions import override

#: Size of the counter at the end of the window, in bytes.
COUNTER_BYTES = 8


def pattern(num_bytes: int) -> np.ndarray:
    """Return the initial content of a window, uint8 `[num_bytes]`: float32 numbers, followed by a counter of 0."""
    # The period is a prime number, so that neighboring memory pages differ.
    numbers = np.resize(np.arange(251, dtype=np.float32), (num_bytes - COUNTER_BYTES) // 4)
    return np.concatenate([numbers.view(np.uint8), np.zeros(COUNTER_BYTES, dtype=np.uint8)])


class Buffer:
    """Buffer in host memory, uint8 `[n]`, for the origin or for the target's window. `memory` is passed to MPI."""

    def __init__(self, values: np.ndarray) -> None:
        self.memory: np.ndarray | memoryview = values

    def fill(self, value: int, num_bytes: int) -> None:
        """Set each of the first `num_bytes` bytes to `value`."""
        np.asarray(self.memory)[:num_bytes] = value

    def read(self, num_bytes: int) -> np.ndarray:
        """Return the first `num_bytes` bytes in host memory."""
        return np.asarray(self.memory)[:num_bytes]

    def contains(self, value: int, num_bytes: int) -> bool:
        """Return True if each of the first `num_bytes` bytes equals `value`."""
        return bool((self.read(num_bytes) == value).all())


class ProbeLink:
    """Buffers of an origin, and the expected content of the window of `target`, a rank of the window's group.

    Args:
        win: Locked window with a displacement unit of one byte.
        expected: Expected content of the target's window, including the counter, uint8 `[n]`. Checks update it. Links
            with the same target share it.
        allocate: Function that creates a buffer with the given initial content.
        rotation: Number of elements by which the sent values are rotated, so that links send different values.
    """

    def __init__(
        self, win: MPI.Win, target: int, expected: np.ndarray, allocate: Callable[[np.ndarray], Buffer], rotation: int
    ) -> None:
        self.win, self.target, self.expected = win, target, expected
        first = pattern(expected.size)[: expected.size - COUNTER_BYTES]
        self.values = np.roll(first.view(np.float32)[::-1], rotation).view(np.uint8)
        self.sent, self.received = allocate(self.values), allocate(np.ones(expected.size, dtype=np.uint8))

    def get(self, num_bytes: int) -> None:
        """Read the first `num_bytes` bytes of the target's window into `received`. One-sided."""
        self.win.Get([self.received.memory[:num_bytes], MPI.BYTE], self.target, (0, num_bytes, MPI.BYTE))
        self.win.Flush(self.target)


class TrialOperation:
    """One-sided operation on one target, which can be run repeatedly and then checked."""

    #: Size of a small operation, in bytes.
    small_bytes = 64
    #: True if larger sizes are tried, too.
    grows = True

    def __init__(self, link: ProbeLink) -> None:
        self.link = link
        self._runs: Counter[int] = Counter()  # by number of bytes

    def run(self, num_bytes: int) -> None:
        """Run the operation on `num_bytes` bytes, and wait until it is complete at the target. One-sided."""
        self._runs[num_bytes] += 1
        self._run(num_bytes)

    def is_correct(self) -> bool:
        """Return True if all runs had the expected effect. One-sided."""
        max_bytes = max(self._runs)
        return np.array_equal(self.link.received.read(max_bytes), self.link.expected[:max_bytes])

    def _run(self, num_bytes: int) -> None:
        raise NotImplementedError


class Get(TrialOperation):
    """Reads the target's window."""

    def _run(self, num_bytes: int) -> None:
        self.link.get(num_bytes)


class Write(TrialOperation):
    """Writes the values of a buffer at the origin to the target's window, or adds them to it."""

    def write(self, source: Buffer, num_bytes: int) -> None:
        """Write or add the first `num_bytes` bytes of `source`, and wait for completion. One-sided."""
        raise NotImplementedError

    @override
    def is_correct(self) -> bool:
        link, max_bytes = self.link, max(self._runs)
        for num_bytes, num_runs in self._runs.items():
            self._expect(link.expected[:num_bytes], link.values[:num_bytes], num_runs)
        link.received.fill(255, max_bytes)
        link.get(max_bytes)
        is_correct = super().is_correct()
        # The next operation starts from the actual content, correct or not.
        link.expected[:max_bytes] = link.received.read(max_bytes)
        return is_correct

    def _run(self, num_bytes: int) -> None:
        self.write(self.link.sent, num_bytes)

    def _expect(self, content: np.ndarray, values: np.ndarray, num_runs: int) -> None:
        """Change the expected content as `num_runs` runs with the same values do."""
        raise NotImplementedError


class Put(Write):
    """Overwrites the target's window with its initial numbers in a different order."""

    @override
    def write(self, source: Buffer, num_bytes: int) -> None:
        win, target = self.link.win, self.link.target
        win.Put([source.memory[:num_bytes], MPI.BYTE], target, (0, num_bytes, MPI.BYTE))
        win.Flush(target)

    @override
    def _expect(self, content: np.ndarray, values: np.ndarray, num_runs: int) -> None:
        content[:] = values


class Accumulate(Write):
    """Adds integer-valued float32 numbers, small enough for every sum to be exact."""

    @override
    def write(self, source: Buffer, num_bytes: int) -> None:
        win, target = self.link.win, self.link.target
        win.Accumulate([source.memory[:num_bytes], MPI.FLOAT], target, (0, num_bytes // 4, MPI.FLOAT), MPI.SUM)
        win.Flush(target)

    @override
    def _expect(self, content: np.ndarray, values: np.ndarray, num_runs: int) -> None:
        content.view(np.float32)[:] += num_runs * values.view(np.float32)


class FetchAndOp(TrialOperation):
    """Increments the counter and fetches its previous value. The check reads the counter as the work queue does."""

    small_bytes = COUNTER_BYTES
    grows = False

    def __init__(self, link: ProbeLink) -> None:
        super().__init__(link)
        self._one, self._fetched = np.ones(1, dtype=np.int64), np.empty(1, dtype=np.int64)
        self._offset = link.expected.size - COUNTER_BYTES
        self._fetched_in_order = True

    def _run(self, num_bytes: int) -> None:
        win, target = self.link.win, self.link.target
        win.Fetch_and_op([self._one, MPI.INT64_T], [self._fetched, MPI.INT64_T], target, self._offset, MPI.SUM)
        win.Flush(target)
        self._fetched_in_order &= bool(self._fetched[0] == self._runs[num_bytes] - 1)

    @override
    def is_correct(self) -> bool:
        self._get_accumulate()
        return self._fetched_in_order and bool(self._fetched[0] == self._runs.total())

    def _get_accumulate(self) -> None:
        link, location, element = self.link, (self._offset, 1, MPI.INT64_T), MPI.INT64_T
        link.win.Get_accumulate([self._one, element], [self._fetched, element], link.target, location, MPI.NO_OP)
        link.win.Flush(link.target)


#: Classes of the operations, keyed by their names in a report.
OPERATIONS_BY_NAME: dict[str, Any] = {"get": Get, "put": Put, "accumulate": Accumulate, "fetch_and_op": FetchAndOp}

"""One-sided operations that a probe tries, with checks of their results.

A target's window contains float32 numbers followed by a 64-bit counter. The numbers are small integers whose sums are
exact, so results are compared bitwise with the expected content, which the origin keeps.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

#: Size of the counter at the end of the window, in bytes.
COUNTER_BYTES = 8
#: Size of a small operation, in bytes.
SMALL_BYTES = 64


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
        """Return the first `num_bytes` bytes as an array in host memory, uint8 `[num_bytes]`."""
        return np.asarray(self.memory)[:num_bytes]

    def contains(self, value: int, num_bytes: int) -> bool:
        """Return True if each of the first `num_bytes` bytes equals `value`."""
        return bool((self.read(num_bytes) == value).all())


class ProbeLink:
    """Operations on the window of rank `target` in the window's group, with buffers at the origin.

    Put overwrites the numbers with the initial numbers in a different order. Accumulate adds the same values.
    Fetch_and_op increments the counter.

    Args:
        win: Locked window with a displacement unit of one byte.
        num_bytes: Size of the target's window, including the counter.
        make_buffer: Function that creates a buffer with the given initial content.
    """

    def __init__(self, win: MPI.Win, target: int, num_bytes: int, make_buffer: Callable[[np.ndarray], Buffer]) -> None:
        self._win, self._target = win, target
        self._expected = pattern(num_bytes)  # content of the target's window
        self._values = self._expected[:-COUNTER_BYTES].view(np.float32)[::-1].copy().view(np.uint8)
        self._sent, self.received = make_buffer(self._values), make_buffer(np.ones(num_bytes, dtype=np.uint8))
        self._one, self._fetched = np.ones(1, dtype=np.int64), np.empty(1, dtype=np.int64)
        self._counter = (num_bytes - COUNTER_BYTES, 1, MPI.INT64_T)
        self._fetched_in_order = True
        self._runs: Counter[int] = Counter()  # of the current operation, by number of bytes

    def run(self, name: str, num_bytes: int) -> None:
        """Run an operation on `num_bytes` bytes, and wait until it is complete at the target. One-sided.

        Call `is_correct` before running another operation.
        """
        self._runs[num_bytes] += 1
        self._run(name, num_bytes)

    def get(self, num_bytes: int) -> None:
        """Read the first `num_bytes` bytes of the target's window into `received`. One-sided."""
        self._win.Get([self.received.memory[:num_bytes], MPI.BYTE], self._target, (0, num_bytes, MPI.BYTE))
        self._win.Flush(self._target)

    def write(self, name: str, source: Buffer, num_bytes: int) -> None:
        """Run `name` ("put" or "accumulate") on `num_bytes` bytes of `source`, and wait for completion. One-sided."""
        memory = source.memory[:num_bytes]
        if name == "put":
            self._win.Put([memory, MPI.BYTE], self._target, (0, num_bytes, MPI.BYTE))
        else:
            self._win.Accumulate([memory, MPI.FLOAT], self._target, (0, num_bytes // 4, MPI.FLOAT), MPI.SUM)
        self._win.Flush(self._target)

    def is_correct(self, name: str) -> bool:
        """Return True if all runs of an operation had the expected effect. One-sided."""
        runs, self._runs = self._runs, Counter()
        if name == "fetch_and_op":
            self._read_counter()
            return self._fetched_in_order and bool(self._fetched[0] == runs.total())
        if name == "get":
            return np.array_equal(self.received.read(max(runs)), self._expected[: max(runs)])
        for num_bytes, num_runs in runs.items():
            content, values = self._expected[:num_bytes], self._values[:num_bytes]
            if name == "put":
                content[:] = values
            else:
                content.view(np.float32)[:] += num_runs * values.view(np.float32)
        return self.update_expected(max(runs))

    def update_expected(self, num_bytes: int) -> bool:
        """Read the first `num_bytes` bytes of the target's window, which later checks expect there. One-sided.

        Returns True if they had the expected content.
        """
        self.received.fill(255, num_bytes)
        self.get(num_bytes)
        actual, expected = self.received.read(num_bytes), self._expected[:num_bytes]
        is_correct = np.array_equal(actual, expected)
        expected[:] = actual
        return is_correct

    def _run(self, name: str, num_bytes: int) -> None:
        if name == "get":
            self.get(num_bytes)
        elif name != "fetch_and_op":
            self.write(name, self._sent, num_bytes)
        else:
            one, fetched = [self._one, MPI.INT64_T], [self._fetched, MPI.INT64_T]
            self._win.Fetch_and_op(one, fetched, self._target, self._counter[0], MPI.SUM)
            self._win.Flush(self._target)
            self._fetched_in_order &= bool(self._fetched[0] == self._runs[num_bytes] - 1)

    def _read_counter(self) -> None:
        """Read the counter as the work queue does."""
        one, fetched = [self._one, MPI.INT64_T], [self._fetched, MPI.INT64_T]
        self._win.Get_accumulate(one, fetched, self._target, self._counter, MPI.NO_OP)
        self._win.Flush(self._target)

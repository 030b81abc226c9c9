"""Trial of a one-sided operation by a pair of ranks.

    commands   messages from the origin to the target: compute for a given time, wait, write a value, or stop
    idle       small operations while the target waits inside MPI for the next command
    busy       small operations while the target computes and does not enter MPI
    bandwidth  large operations while the target waits inside MPI
    staleness  only for Get: the target writes a value with store instructions, or with a kernel on a device, and sends
               a message; the origin reads the value as soon as it has received the message
    result     the origin broadcasts the measurements to all ranks, which have been waiting for the broadcast

Only the origin's clock is used. The target receives the next command only after it has computed for the given time. The
origin can thus observe when the computation ended, and subtract the given time to determine when it began. A
measurement is valid if it began during the computation. The operation is one-sided if it took only a short time and the
target kept computing for at least half of the given time after the last measurement.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from odc_mpi.probe import operations
from odc_mpi.probe.report import Cause, OperationResult
from odc_mpi.runtime.deadline import SLEEP_S
from odc_mpi.runtime.world import World

T = TypeVar("T")

#: Default kind of memory for the buffers at the origin: host memory.
HOST = "from_host"
#: Sizes of the large operations in bytes, in the order of the trials.
LARGE_BYTES = (1 << 16, 1 << 20, 1 << 24)
#: Maximum number of runs for each large size. The fastest run is used, because the first one may fault in pages.
LARGE_RUNS = 3
#: Sizes of the values tested for staleness, in bytes. They take turns, because libraries choose protocols by size.
STALENESS_BYTES = (64, 1 << 12, 1 << 16)
#: Maximum number of small operations over which the median time is computed.
SMALL_RUNS = 20
#: Factor by which the target computes longer in the trials that confirm that an operation waits for it. A short delay
#: may have another cause, such as another process on the same core.
LONGER_FACTOR = 3
#: Maximum time of a one-sided operation with a busy target, as a multiple of its time with an idle target.
MUCH_LONGER_FACTOR = 20
#: Lower bound of this maximum, in seconds, for machines with more processes than cores.
CROWDED_S = 10e-3


@dataclass(frozen=True)
class TrialBudget:
    """Time limits for the trial of one operation with one kind of peer.

    Attributes:
        idle_s: Time for small operations while the target waits, in seconds.
        busy_s: Duration of the target's first computation, in seconds.
        bandwidth_s: Time for large operations, in seconds. Sizes that would take longer are skipped.
        num_staleness_reads: Maximum number of values tested for staleness.
        staleness_s: Maximum duration of the staleness test, in seconds.
    """

    idle_s: float
    busy_s: float
    bandwidth_s: float
    num_staleness_reads: int
    staleness_s: float


#: Collective function that creates the window for the trials, with a displacement unit of one byte. Its second argument
#: is the content of the window on this rank, uint8 `[n]`. It returns a sequence of windows and the memory of this rank.
#: The first window is used. A second window, if any, owns the memory of the first.
Allocate = Callable[[World, np.ndarray], tuple[Sequence[MPI.Win], operations.Buffer]]


def allocate(world: World, values: np.ndarray) -> tuple[Sequence[MPI.Win], operations.Buffer]:
    """Create a window with `Win.Allocate`, as for gradients, with the content `values` on this rank. Collective."""
    win = MPI.Win.Allocate(values.size, 1, MPI.INFO_NULL, world.comm)
    return [win], _filled(win, values)


def allocate_shared(world: World, values: np.ndarray) -> tuple[Sequence[MPI.Win], operations.Buffer]:
    """Create a window on the shared memory of each node, as for parameters, with the content `values`. Collective."""
    shared = MPI.Win.Allocate_shared(values.size, 1, MPI.INFO_NULL, world.node_comm)
    memory = _filled(shared, values)
    return [MPI.Win.Create(shared.tomemory(), 1, MPI.INFO_NULL, world.comm), shared], memory


def _filled(win: MPI.Win, values: np.ndarray) -> operations.Buffer:
    memory = np.asarray(win.tomemory())
    memory[:] = values
    return operations.Buffer(memory)


class Trials:
    """Window in which pairs of ranks try operations. Construction is collective.

    Args:
        pairs: Origin and target for each kind of peer (see `probe.find_pairs`).
        max_bytes: Size of the largest operation, in bytes.
        origins: Functions that create a buffer at the origin with the given content, keyed by kind of memory.
    """

    def __init__(
        self,
        world: World,
        pairs: dict[str, tuple[int, int]],
        budget: TrialBudget,
        max_bytes: int,
        allocate: Allocate = allocate,
        origins: Mapping[str, Callable[[np.ndarray], operations.Buffer]] = {HOST: operations.Buffer},
    ) -> None:
        self._world, self._pairs, self._budget, self._max_bytes = world, pairs, budget, max_bytes
        num_bytes = max_bytes + operations.COUNTER_BYTES
        is_target = world.rank in [target for _, target in pairs.values()]
        with world.collective("allocating the window of a probe"):
            self._comm = world.comm.Dup()
            # All ranks, as in training, since libraries choose protocols by the group of a window.
            values = operations.pattern(num_bytes if is_target else operations.COUNTER_BYTES)
            self._windows, self._memory = allocate(world, values)
            self._win = self._windows[0]
            self._win.Lock_all(MPI.MODE_NOCHECK)
            self._win.Sync()
        self._links: dict[tuple[str, str], operations.ProbeLink] = {}
        for kind, (origin, target) in pairs.items():
            if world.rank == origin:
                expected = operations.pattern(num_bytes)
                for rotation, (memory, make) in enumerate(origins.items()):
                    self._links[kind, memory] = operations.ProbeLink(self._win, target, expected, make, rotation)
        world.wait_collective(self._comm.Ibarrier(), "filling the window of a probe")

    def run(self, name: str, kind: str, memory: str = HOST) -> tuple[OperationResult, Cause | None]:
        """Try an operation, and return its result and the cause of its problem (None without a problem). Collective.

        Args:
            name: Name of the operation, a key of `OPERATIONS_BY_NAME`.
            kind: Kind of peer, a key of `pairs`.
            memory: Kind of memory at the origin, a key of `origins`.
        """
        origin, target = self._pairs[kind]
        what = f"trying {name} with a peer ({kind})"
        numbers = np.full(7, np.nan)
        with self._world.deadline(what):
            if self._world.rank == origin:
                numbers[:] = self._measure(operations.OPERATIONS_BY_NAME[name](self._links[kind, memory]), target)
            elif self._world.rank == target:
                self._run_target(origin)
        # Other ranks wait here during the trial.
        self._world.wait_collective(self._comm.Ibcast(numbers, root=origin), what)
        idle_s, busy_s, gb_per_s, one_sided, is_valid, is_correct, is_current = numbers.tolist()
        if not (is_correct and is_current):
            return OperationResult(), Cause.STALE if is_correct else Cause.WRONG
        if not is_valid:
            return OperationResult(None, idle_s, busy_s, gb_per_s), Cause.INCONCLUSIVE
        return OperationResult(bool(one_sided), idle_s, busy_s, gb_per_s), None

    def close(self) -> None:
        """Free the windows and the communicator of the trials. Collective."""
        self._links.clear()
        with self._world.collective("freeing the window of a probe"):
            self._win.Unlock_all()
            for win in self._windows:
                win.Free()
            self._comm.Free()

    def _measure(self, operation: operations.TrialOperation, target: int) -> tuple[float, ...]:
        """Run the trial on the origin. Return idle_s, busy_s, gb_per_s, one_sided, is_valid, is_correct, is_current."""
        operation.run(operation.small_bytes)  # opens connections and faults in pages
        idle_s = _median(lambda: operation.run(operation.small_bytes), self._budget.idle_s)
        busy_s, one_sided, is_valid = self._while_busy(operation, target, idle_s)
        gb_per_s = self._bandwidth(operation) if operation.grows else operation.small_bytes / idle_s / 1e9
        is_correct = operation.is_correct()
        is_current = not isinstance(operation, operations.Get) or self._reads_are_current(operation.link, target)
        self._send_command(target, stop=True)
        return idle_s, busy_s, gb_per_s, one_sided, is_valid, is_correct, is_current

    def _while_busy(self, operation: operations.TrialOperation, target: int, idle_s: float) -> tuple[float, bool, bool]:
        """Measure small operations while the target computes.

        Return the median time in seconds, whether the operation is one-sided, and whether the result is valid.
        """
        first_s = self._budget.busy_s
        median_s, one_sided, is_valid = 0.0, False, False
        for compute_s in (first_s, LONGER_FACTOR * first_s, LONGER_FACTOR * first_s):
            self._start_busy(target, compute_s)
            began = time.perf_counter()
            median_s = _median(lambda: operation.run(operation.small_bytes), compute_s / 20)
            ended = time.perf_counter()
            self._send_command(target, stop=False)
            target_ended = time.perf_counter()
            # Two criteria, since on a crowded machine either may mislead: a short duration, and completion long before
            # the target's computation ended. An operation that waits takes four fifths of the computation.
            is_short = median_s < min(compute_s / 10, max(MUCH_LONGER_FACTOR * idle_s, CROWDED_S))
            one_sided = is_short and ended < target_ended - compute_s / 2
            is_valid = began > target_ended - compute_s
            if is_valid and (one_sided or compute_s > first_s):
                break
        return median_s, one_sided, is_valid

    def _bandwidth(self, operation: operations.TrialOperation) -> float:
        left_s, next_s, gb_per_s = self._budget.bandwidth_s, 0.0, 0.0
        for num_bytes in (size for size in LARGE_BYTES if size <= self._max_bytes):
            if next_s > left_s:
                break
            times: list[float] = []
            while len(times) < LARGE_RUNS and (not times or min(times) < left_s):
                times.append(timed(lambda: operation.run(num_bytes)))  # noqa: B023 - called at once
                left_s -= times[-1]
            gb_per_s = num_bytes / min(times) / 1e9
            next_s = min(times) * (LARGE_BYTES[1] // LARGE_BYTES[0])
        return gb_per_s

    def _reads_are_current(self, link: operations.ProbeLink, target: int) -> bool:
        """Return True if no read returned an old value after the target had announced a new one.

        MPI may deliver the announcement before the value can be read, although the value was written first.
        """
        announced, is_current, end = np.empty(4), True, time.perf_counter() + self._budget.staleness_s
        for number in range(self._budget.num_staleness_reads):
            num_bytes, value = STALENESS_BYTES[number % len(STALENESS_BYTES)], number % 251 + 1
            command = np.array([0.0, False, num_bytes, value])
            self._world.wait(self._comm.Isend(command, target), "sending a command of a probe")
            self._world.wait(self._comm.Irecv(announced, target), "waiting for a value of a probe")
            self._win.Sync()
            link.get(num_bytes)
            is_current = is_current and bool((link.received.read(num_bytes) == value).all())
            link.expected[:num_bytes] = value
            if time.perf_counter() > end:
                break
        return is_current

    def _start_busy(self, target: int, busy_s: float) -> None:
        """Command the target to compute, and wait until it has probably received the command and left MPI."""
        end = time.perf_counter() + busy_s / 5
        # Not a synchronous send: with MPICH over TCP, it would only complete when the target is back in MPI.
        self._world.wait(self._comm.Isend(np.array([busy_s, False, 0, 0]), target), "sending a command of a probe")
        while time.perf_counter() < end:
            self._comm.Iprobe(target)  # the message may only be sent while this rank is in MPI
            time.sleep(SLEEP_S)

    def _send_command(self, target: int, *, stop: bool) -> None:
        """Command the target to wait, or to stop. Returns when the target has entered MPI and received the command."""
        self._world.wait(self._comm.Issend(np.array([0.0, stop, 0, 0]), target), "sending a command of a probe")

    def _run_target(self, origin: int) -> None:
        command = np.zeros(4)  # seconds to compute, 1 to stop, number of bytes to write, value of each of them
        while not command[1]:
            self._world.wait(self._comm.Irecv(command, origin), "receiving a command of a probe")
            busy_s, _, num_bytes, value = command.tolist()
            if not num_bytes:
                compute(busy_s)
                continue
            self._memory.fill(int(value), int(num_bytes))
            self._win.Sync()
            self._world.wait(self._comm.Isend(command, origin), "announcing a value of a probe")


def repeat_for(budget_s: float, sample: Callable[[], T], max_repeats: int | None = None) -> list[T]:
    """Call `sample` for `budget_s` seconds, at least once and at most `max_repeats` times, and return the results."""
    end = time.perf_counter() + budget_s
    samples = [sample()]
    while time.perf_counter() < end and len(samples) != max_repeats:
        samples.append(sample())
    return samples


def timed(function: Callable[[], object]) -> float:
    """Call a function and return its duration in seconds."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def compute(seconds: float) -> None:
    """Compute for `seconds` without entering MPI. Unlike sleeping, this occupies a core that MPI threads may need."""
    matrix = np.ones((32, 32), dtype=np.float32)
    product = np.empty_like(matrix)
    repeat_for(seconds, lambda: np.matmul(matrix, matrix, out=product))


def _median(function: Callable[[], object], budget_s: float) -> float:
    """Return the median duration of a call in seconds, over at most `SMALL_RUNS` calls that start within `budget_s`."""
    return statistics.median(repeat_for(budget_s, lambda: timed(function), SMALL_RUNS))

"""Trial of a one-sided operation by a pair of ranks.

    commands   messages from the origin to the target: compute for a given time, wait, write or check a value, or stop
    idle       small operations while the target waits inside MPI for the next command
    busy       small operations while the target computes and does not enter MPI
    bandwidth  large operations while the target waits inside MPI
    staleness  for Get, the target writes a value with store instructions, or with a kernel on a device, and sends a
               message; the origin reads the value as soon as it has received the message. For Put and Accumulate on a
               device, the origin writes a value, flushes and sends a message; the target reads the value with a kernel
               as soon as it has received the message, and clears it with a second kernel before it replies
    result     the origin broadcasts the measurements to all ranks, which have been waiting for the broadcast

Only the origin's clock is used. The target receives the next command only after it has computed for the given time. The
origin thus observes when the computation ended, and subtracts the given time to determine when it began. A measurement
is valid if it began during the computation. The operation is one-sided if it took only a short time and the target kept
computing for at least half of the given time after the last measurement.
"""

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from odc_mpi.probe import operations
from odc_mpi.probe.report import INCONCLUSIVE, STALE, WRONG, OperationResult
from odc_mpi.runtime.deadline import SLEEP_S
from odc_mpi.runtime.world import World

T = TypeVar("T")

#: Sizes of the large operations in bytes, in the order of the trials.
LARGE_BYTES = (1 << 16, 1 << 20, 1 << 24)
#: Maximum number of runs for each large size. The fastest run is used, because the first one may fault in pages.
LARGE_RUNS = 3
#: Sizes of the values tested for staleness, in bytes. They alternate, because libraries choose protocols by size.
STALENESS_BYTES = (64, 1 << 12, 1 << 16)
#: Maximum number of small operations over which the median time is computed.
SMALL_RUNS = 20
#: Maximum time of a one-sided operation with a busy target, as a multiple of its time with an idle target.
MUCH_LONGER_FACTOR = 20
#: Lower bound on this maximum, in seconds, for machines with more processes than cores.
CROWDED_S = 10e-3


@dataclass(frozen=True)
class TrialBudget:
    """Time limits for the trial of one operation with one kind of peer.

    Attributes:
        idle_s: Time for small operations while the target waits, in seconds.
        busy_s: Durations of the target's computations, in seconds. Only the longest may show that an operation waits
            for its target: a short delay may have another cause, such as another process on the same core.
        bandwidth_s: Time for large operations, in seconds. Sizes that would take longer are skipped. 0 to try none.
        num_staleness_reads: Maximum number of values tested for staleness.
        staleness_s: Maximum duration of the staleness test, in seconds.
    """

    idle_s: float
    busy_s: tuple[float, ...]
    bandwidth_s: float
    num_staleness_reads: int
    staleness_s: float


#: Actions of the target: the first number in a command. The second number is the time to compute in seconds, or the
#: number of bytes to write or to check. The third number is the value of each of these bytes. A check also clears them.
_COMPUTE, _WRITE, _CHECK, _STOP = range(4)

#: Collective function that creates the window for the trials, with a displacement unit of one byte and the given
#: content on this rank, uint8 `[n]`. It returns windows and the memory of this rank. The first window is used. A second
#: window, if any, owns the memory of the first.
Allocate = Callable[[World, np.ndarray], tuple[Sequence[MPI.Win], operations.Buffer]]


def allocate(world: World, values: np.ndarray) -> tuple[Sequence[MPI.Win], operations.Buffer]:
    """Create a window with `Win.Allocate`, like that for gradients, with `values` as its local content. Collective."""
    win = MPI.Win.Allocate(values.size, 1, MPI.INFO_NULL, world.comm)
    return [win], _filled(win, values)


def allocate_shared(world: World, values: np.ndarray) -> tuple[Sequence[MPI.Win], operations.Buffer]:
    """Create a window over memory that each node's ranks share, like that for parameters. Collective.

    Fills this rank's part with `values`. Returns the window and the node's shared window, and this rank's part.
    """
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
        make_buffer: Function that creates a buffer at the origin with the given content.
        staleness_tests: Operations to test for staleness. The default is Get only: with libfabric's tcp provider, Put
            may be late, but mailboxes in host memory detect this.
    """

    def __init__(
        self,
        world: World,
        pairs: dict[str, tuple[int, int]],
        budget: TrialBudget,
        max_bytes: int,
        allocate: Allocate = allocate,
        make_buffer: Callable[[np.ndarray], operations.Buffer] = operations.Buffer,
        staleness_tests: Collection[str] = ("get",),
    ) -> None:
        self._world, self._pairs, self._budget, self._max_bytes = world, pairs, budget, max_bytes
        self._staleness_tests = staleness_tests
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
        self._links = {
            kind: operations.ProbeLink(self._win, target, num_bytes, make_buffer)
            for kind, (origin, target) in pairs.items()
            if world.rank == origin
        }
        world.wait_collective(self._comm.Ibarrier(), "filling the window of a probe")

    def run(self, name: str, kind: str) -> tuple[OperationResult, str | None]:
        """Try an operation, and return its result and any problem. Collective.

        `name` is a key of `report.OPERATION_NAMES`, and `kind` is a key of `pairs`.
        """
        origin, target = self._pairs[kind]
        what = f"trying {name} with a peer ({kind})"
        outcome = None
        with self._world.deadline(what):
            if self._world.rank == origin:
                outcome = self._try(self._links[kind], name, target)
            elif self._world.rank == target:
                self._run_target(origin)
        # Other ranks wait here during the trial.
        with self._world.collective(what):
            return self._comm.bcast(outcome, root=origin)

    def close(self) -> None:
        """Free the windows and the communicator of the trials. Collective."""
        self._links.clear()
        with self._world.collective("freeing the window of a probe"):
            self._win.Unlock_all()
            for win in self._windows:
                win.Free()
            self._comm.Free()

    def _try(self, link: operations.ProbeLink, name: str, target: int) -> tuple[OperationResult, str | None]:
        is_ticket = name == "fetch_and_op"
        small_bytes = operations.COUNTER_BYTES if is_ticket else operations.SMALL_BYTES

        def run(num_bytes: int = small_bytes) -> None:
            link.run(name, num_bytes)

        run()  # opens connections and faults in pages
        idle_s = _median(run, self._budget.idle_s)
        busy_s, one_sided = self._while_busy(run, target, idle_s)
        gb_per_s = small_bytes / idle_s / 1e9 if is_ticket else self._bandwidth(run)
        is_correct = link.is_correct(name)
        num_reads, num_fresh = self._read_new_values(link, name, target) if name in self._staleness_tests else (0, 0)
        self._send(target, _STOP)
        num_fresh_reads = num_fresh if num_reads else None
        if not is_correct or num_fresh < num_reads:
            return OperationResult(num_fresh_reads=num_fresh_reads), STALE if is_correct else WRONG
        result = OperationResult(one_sided, idle_s, busy_s, gb_per_s, num_fresh_reads)
        return result, INCONCLUSIVE if one_sided is None else None

    def _while_busy(self, run: Callable[[], None], target: int, idle_s: float) -> tuple[float, bool | None]:
        """Measure small operations while the target computes.

        Return the median time in seconds, and whether the operation is one-sided, or None if no measurement was valid.
        """
        median_s = 0.0
        for compute_s in self._budget.busy_s:
            self._start_busy(target, compute_s)
            began = time.perf_counter()
            median_s = _median(run, compute_s / 20)
            ended = time.perf_counter()
            self._send(target, _COMPUTE)
            target_ended = time.perf_counter()
            # Two criteria, since on a crowded machine either may mislead: a short duration, and completion long before
            # the target's computation ended. An operation that waits takes four fifths of the computation.
            is_short = median_s < min(compute_s / 10, max(MUCH_LONGER_FACTOR * idle_s, CROWDED_S))
            one_sided = is_short and ended < target_ended - compute_s / 2
            is_valid = began > target_ended - compute_s
            if is_valid and (one_sided or compute_s == self._budget.busy_s[-1]):
                return median_s, one_sided
        return median_s, None

    def _bandwidth(self, run: Callable[[int], None]) -> float | None:
        left_s, next_s, gb_per_s = self._budget.bandwidth_s, 0.0, None
        for num_bytes in (size for size in LARGE_BYTES if size <= self._max_bytes):
            if next_s >= left_s:
                break
            times: list[float] = []
            while len(times) < LARGE_RUNS and (not times or min(times) < left_s):
                times.append(timed(partial(run, num_bytes)))
                left_s -= times[-1]
            gb_per_s = num_bytes / min(times) / 1e9
            next_s = min(times) * (LARGE_BYTES[1] // LARGE_BYTES[0])
        return gb_per_s

    def _read_new_values(self, link: operations.ProbeLink, name: str, target: int) -> tuple[int, int]:
        """Return the number of reads that followed an announcement, and how many of them returned the new value.

        MPI may deliver the announcement before the value can be read, although the value was written first. For Put and
        Accumulate, a value replaces zeros. As float32 numbers, all of the values are normal, so the sums are exact.
        """
        num_reads, num_fresh = 0, 0
        end = time.perf_counter() + self._budget.staleness_s
        self._exchange_value(target, _WRITE, STALENESS_BYTES[-1], 0)
        while num_reads < self._budget.num_staleness_reads and time.perf_counter() < end:
            num_bytes, value = STALENESS_BYTES[num_reads % len(STALENESS_BYTES)], num_reads % 251 + 1
            if name == "get":
                self._exchange_value(target, _WRITE, num_bytes, value)
                link.get(num_bytes)
                num_fresh += link.received.contains(value, num_bytes)
            else:
                link.received.fill(value, num_bytes)
                link.write(name, link.received, num_bytes)
                num_fresh += self._exchange_value(target, _CHECK, num_bytes, value)
            num_reads += 1
        link.update_expected(STALENESS_BYTES[-1])
        return num_reads, num_fresh

    def _exchange_value(self, target: int, action: int, num_bytes: int, value: int) -> bool:
        """Let the target write a value, or check and clear it, and return the result of its check."""
        self._send(target, action, num_bytes, value)
        is_new = np.zeros(1, dtype=bool)
        self._world.wait(self._comm.Irecv(is_new, target), "waiting for a value of a probe")
        self._win.Sync()
        return bool(is_new[0])

    def _start_busy(self, target: int, busy_s: float) -> None:
        """Let the target compute, and wait until it has probably received the command and left MPI."""
        end = time.perf_counter() + busy_s / 5
        self._send(target, _COMPUTE, busy_s)
        while time.perf_counter() < end:
            self._comm.Iprobe(target)  # the message may only be sent while this rank is in MPI
            time.sleep(SLEEP_S)

    def _send(self, target: int, action: int, amount: float = 0, value: int = 0) -> None:
        """Send a command. If `amount` is 0, so that the target waits or stops, return when it has been received."""
        # Otherwise not a synchronous send: with MPICH over TCP, it would complete when the target is back in MPI.
        send = self._comm.Isend if amount else self._comm.Issend
        command = np.array([action, amount, value], dtype=np.float64)
        self._world.wait(send(command, target), "sending a command of a probe")

    def _run_target(self, origin: int) -> None:
        command = np.empty(3)
        while True:
            self._world.wait(self._comm.Irecv(command, origin), "receiving a command of a probe")
            action, num_bytes, value = map(int, command)
            if action == _STOP:
                return
            if action == _COMPUTE:
                compute(command[1])
                continue
            self._win.Sync()
            is_new = np.array([action == _CHECK and self._memory.contains(value, num_bytes)])
            self._memory.fill(value if action == _WRITE else 0, num_bytes)
            self._win.Sync()
            self._world.wait(self._comm.Isend(is_new, origin), "announcing a value of a probe")


def repeat_for(budget_s: float, sample: Callable[[], T], max_repeats: int | None = None) -> list[T]:
    """Call `sample` for `budget_s` seconds, but at least once and at most `max_repeats` times. Return the results."""
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
    """Return the median duration in seconds of at most `SMALL_RUNS` calls that start within `budget_s`."""
    return statistics.median(repeat_for(budget_s, lambda: timed(function), SMALL_RUNS))

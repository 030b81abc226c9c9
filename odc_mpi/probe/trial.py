"""The trial of a one-sided operation by a pair of ranks; all ranks get the result.

    orders     the origin tells the target by messages to compute for a while, to go on waiting, or to stop
    idle       small operations while the target waits politely inside MPI for the next order
    busy       small operations while the target computes and does not enter MPI
    bandwidth  large operations, as for idle
    result     the origin broadcasts its figures to all ranks; ranks of no pair wait politely meanwhile

The busy spell is timed by the origin's clock alone. The target hears its next order only when its spell is over, so the
origin knows when the spell ended, and by its length when it began. An operation counts if it began after that, and is
one-sided if the target demonstrably went on computing for half of the spell afterwards.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from odc_mpi.probe import operations
from odc_mpi.probe.repeat import repeat_for, timed
from odc_mpi.probe.report import Cause, OperationResult
from odc_mpi.runtime.deadline import SLEEP_S
from odc_mpi.runtime.world import World

#: The kind of an origin's memory by default.
HOST = "from_host"
#: Bytes of the large operations, in the order in which they are tried.
LARGE_BYTES = (1 << 16, 1 << 20, 1 << 24)
#: The most runs of one large size: the best counts, since the first may pay for fresh pages.
LARGE_RUNS = 3
#: The most small operations of a median.
SMALL_RUNS = 20
#: A verdict of "waits" is confirmed by spells this many times as long: at first another process may have had the core.
LONGER_FACTOR = 3
#: An operation that does not wait takes at most so many times as long as with an idle target ...
MUCH_LONGER_FACTOR = 20
#: ... or so many seconds, on a machine with more processes than cores.
CROWDED_S = 10e-3


@dataclass(frozen=True)
class TrialBudget:
    """Seconds for one operation towards one kind of peer.

    Attributes:
        idle_s: Seconds for the small operations.
        busy_s: Seconds of the first spell in which the target computes.
        bandwidth_s: Seconds for the large operations; a size that would take longer is left out.
    """

    idle_s: float
    busy_s: float
    bandwidth_s: float


@dataclass(frozen=True)
class TrialResult:
    """The figures of a trial and its problem, the same on all ranks."""

    operation: OperationResult
    problem: Cause | None


#: Makes the window to probe, in units of one byte, with this content on this rank, `[n]` uint8; second in the list is
#: the window over whose memory the first lies, if there is one. Collective.
Allocate = Callable[[World, np.ndarray], Sequence[MPI.Win]]


def allocate(world: World, values: np.ndarray) -> Sequence[MPI.Win]:
    """Make a window on host memory that ranks of a node do not share, as the transports do. Collective."""
    win = MPI.Win.Allocate(values.size, 1, MPI.INFO_NULL, world.comm)
    np.asarray(win.tomemory())[:] = values
    return [win]


def allocate_shared(world: World, values: np.ndarray) -> Sequence[MPI.Win]:
    """Make a window over memory that the ranks of a node share, as used for parameters. Collective."""
    shared = MPI.Win.Allocate_shared(values.size, 1, MPI.INFO_NULL, world.node_comm)
    np.asarray(shared.tomemory())[:] = values
    return [MPI.Win.Create(shared.tomemory(), 1, MPI.INFO_NULL, world.comm), shared]


class Trials:
    """The window of the trials and this rank's part in them. Creating and closing it is collective.

    Args:
        world: All of its ranks take part.
        pairs: Origin and target for each kind of peer.
        budget: Time to spend.
        most_bytes: Bytes of the largest operation.
        allocate: Makes the window.
        origins: Functions that make the memory of an origin, by the kind of memory.
    """

    def __init__(
        self,
        world: World,
        pairs: dict[str, tuple[int, int]],
        budget: TrialBudget,
        most_bytes: int,
        allocate: Allocate = allocate,
        origins: Mapping[str, Callable[[np.ndarray], operations.Buffer]] = {HOST: operations.Buffer},
    ) -> None:
        self._world, self._pairs, self._budget, self._most_bytes = world, pairs, budget, most_bytes
        num_bytes = most_bytes + operations.COUNTER_BYTES
        is_target = world.rank in [target for _, target in pairs.values()]
        with world.collective("allocating the window of a probe"):
            self._comm = world.comm.Dup()
            # Over all ranks, as in training: libraries choose their protocols by the group of a window.
            self._windows = allocate(world, operations.pattern(num_bytes if is_target else operations.COUNTER_BYTES))
            self._win = self._windows[0]
            self._win.Lock_all(MPI.MODE_NOCHECK)
            self._win.Sync()
        self._links: dict[tuple[str, str], operations.ProbeLink] = {}
        for kind, (origin, target) in pairs.items():
            if world.rank == origin:
                expected = operations.pattern(num_bytes)
                for turn, (memory, make) in enumerate(origins.items()):
                    self._links[kind, memory] = operations.ProbeLink(self._win, target, expected, make, turn)
        world.wait_collective(self._comm.Ibarrier(), "filling the window of a probe")

    def run(self, name: str, kind: str, memory: str = HOST) -> TrialResult:
        """Try one operation with one kind of peer, from one kind of memory. Collective."""
        origin, target = self._pairs[kind]
        what = f"trying {name} with peers of {kind}"
        numbers = np.full(6, np.nan)
        with self._world.deadline(what):
            if self._world.rank == origin:
                numbers[:] = self._measure(operations.BY_NAME[name](self._links[kind, memory]), target)
            elif self._world.rank == target:
                self._run_target(origin)
        # Ranks of no pair wait here for the whole trial.
        self._world.wait_collective(self._comm.Ibcast(numbers, root=origin), what)
        idle_s, busy_s, gb_per_s, one_sided, is_sure, is_right = numbers.tolist()
        if not is_right:
            return TrialResult(OperationResult(), Cause.WRONG)
        if not is_sure:
            return TrialResult(OperationResult(None, idle_s, busy_s, gb_per_s), Cause.INCONCLUSIVE)
        return TrialResult(OperationResult(bool(one_sided), idle_s, busy_s, gb_per_s), None)

    def close(self) -> None:
        """Free the window. Collective."""
        self._links.clear()
        with self._world.collective("freeing the window of a probe"):
            self._win.Unlock_all()
            for win in self._windows:
                win.Free()
            self._comm.Free()

    def _measure(self, operation: operations.TrialOperation, target: int) -> tuple[float, ...]:
        """Do the origin's part."""
        operation.run(operation.small_bytes)  # pays for connections and fresh pages
        idle_s = _median(lambda: operation.run(operation.small_bytes), self._budget.idle_s)
        busy_s, one_sided, is_sure = self._while_busy(operation, target, idle_s)
        gb_per_s = self._bandwidth(operation) if operation.grows else operation.small_bytes / idle_s / 1e9
        is_right = operation.is_correct()
        self._send_command(target, stop=True)
        return idle_s, busy_s, gb_per_s, one_sided, is_sure, is_right

    def _while_busy(self, operation: operations.TrialOperation, target: int, idle_s: float) -> tuple[float, bool, bool]:
        """Return the seconds with a busy target, whether the operation was one-sided, and whether that is sure."""
        first_s = self._budget.busy_s
        took_s, one_sided, is_sure = 0.0, False, False
        for spell_s in (first_s, LONGER_FACTOR * first_s, LONGER_FACTOR * first_s):
            self._start_busy(target, spell_s)
            began = time.perf_counter()
            took_s = _median(lambda: operation.run(operation.small_bytes), spell_s / 20)
            ended = time.perf_counter()
            self._send_command(target, stop=False)
            free = time.perf_counter()
            # Two signs, since on a crowded machine either may mislead: it came back long before the target did, and at
            # once. One that waits takes four fifths of a spell.
            at_once = took_s < min(spell_s / 10, max(MUCH_LONGER_FACTOR * idle_s, CROWDED_S))
            one_sided = at_once and ended < free - spell_s / 2
            is_sure = began > free - spell_s
            if is_sure and (one_sided or spell_s > first_s):
                break
        return took_s, one_sided, is_sure

    def _bandwidth(self, operation: operations.TrialOperation) -> float:
        left_s, next_s, gb_per_s = self._budget.bandwidth_s, 0.0, 0.0
        for num_bytes in (size for size in LARGE_BYTES if size <= self._most_bytes):
            if next_s > left_s:
                break
            times: list[float] = []
            while len(times) < LARGE_RUNS and (not times or min(times) < left_s):
                times.append(timed(lambda: operation.run(num_bytes)))  # noqa: B023 - called at once
                left_s -= times[-1]
            gb_per_s = num_bytes / min(times) / 1e9
            next_s = min(times) * (LARGE_BYTES[1] // LARGE_BYTES[0])
        return gb_per_s

    def _start_busy(self, target: int, busy_s: float) -> None:
        """Have the target compute, and give it time to leave MPI: on a crowded machine that may take it a moment."""
        end = time.perf_counter() + busy_s / 5
        # Not a synchronous send: MPICH over TCP lets the sender know only when the target is back in MPI.
        self._world.wait(self._comm.Isend(np.array([busy_s, False]), target), "telling the target of a probe")
        while time.perf_counter() < end:
            self._comm.Iprobe(target)  # a message may leave only while its sender is in MPI
            time.sleep(SLEEP_S)

    def _send_command(self, target: int, *, stop: bool) -> None:
        """Order the target to go on waiting, or to stop; return when it is back in MPI and has received the order."""
        self._world.wait(self._comm.Issend(np.array([0.0, stop]), target), "telling the target of a probe")

    def _run_target(self, origin: int) -> None:
        """Do the target's part."""
        order = np.zeros(2)
        while not order[1]:
            self._world.wait(self._comm.Irecv(order, origin), "hearing from the origin of a probe")
            _compute(order[0])


def _compute(seconds: float) -> None:
    """Compute for so long without entering MPI. Not a sleep: training takes cores, also those of MPI's own threads."""
    matrix = np.ones((32, 32), dtype=np.float32)
    product = np.empty_like(matrix)
    repeat_for(seconds, lambda: np.matmul(matrix, matrix, out=product))


def _median(function: Callable[[], object], budget_s: float) -> float:
    """Return the median time of several calls, of fewer if these take all the time, but of one at least."""
    return statistics.median(repeat_for(budget_s, lambda: timed(function), SMALL_RUNS))

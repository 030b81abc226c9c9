"""Computation of a target rank while another rank measures accesses to it: kinds of work, one core per rank, their end.

    begin     a barrier; then one of them, the target, computes and does not enter MPI, or idles at `end`
    measure   rank 0 waits a moment, runs the timed operation, and puts the sample's number into the target's memory
    end       the target sees that number and stops; a barrier, and all ranks receive the seconds

So the target computes for as long as the measurement takes, and notices its end without entering MPI: receiving the
number in its progress thread is part of the measurement. The other ranks wait at `end`.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
import torch

from odc_mpi.comm.progress import IDLE_SHARE, IDLE_SLEEP_S
from odc_mpi.comm.windows.rma import Window, messages
from odc_mpi.runtime.world import World

#: Seconds that rank 0 waits until the target computes, and its progress thread polls as rarely as one without messages.
SETTLE_S = IDLE_SLEEP_S / IDLE_SHARE
#: A sequence of small operations takes about a millisecond, a large product some tens.
_PRODUCT_WIDTH, _SMALL_NUMEL, _NUM_SMALL, _NUM_LOOPS = 1024, 64, 500, 20_000

#: Work to do; None is idling in MPI, as ranks do that wait at a synchronization point.
Work = Callable[[], object] | None


def kinds_of_work() -> dict[str, Callable[[], object]]:
    """Return kinds of work that do not enter MPI, by name."""
    matrix = torch.ones(_PRODUCT_WIDTH, _PRODUCT_WIDTH)
    product = torch.empty_like(matrix)
    vector = torch.ones(_SMALL_NUMEL)

    def small_operations() -> None:
        for _ in range(_NUM_SMALL):
            torch.add(vector, 1.0)

    def python() -> None:
        total = 0
        for i in range(_NUM_LOOPS):
            total += i & 3

    return {
        "large_products": lambda: torch.mm(matrix, matrix, out=product),
        "small_operations": small_operations,
        "python": python,
    }


@dataclass(frozen=True)
class Sample:
    """One measurement, the same on every rank.

    Attributes:
        seconds: Result of rank 0.
        computed_s: Seconds for which the target computed; 0 if it idled.
    """

    seconds: float
    computed_s: float


class Spells:
    """Measurements on rank 0 while a target computes. Construction is collective.

    Args:
        target: Rank that computes.
        settle_s: Seconds that rank 0 waits before it measures.
    """

    def __init__(self, world: World, target: int, settle_s: float = SETTLE_S) -> None:
        self.target = target
        self._world, self._settle_s = world, settle_s
        self._ended = Window(world, 1, torch.int64)
        self._seen = self._ended.tensor.numpy()
        self._number = np.zeros(1, dtype=np.int64)

    def sample(self, work: Work, measure: Callable[[], float]) -> Sample:
        """Measure once. Collective.

        Args:
            work: Work of the target meanwhile.
            measure: Called on rank 0; returns seconds.
        """
        self._number += 1
        self._meet("beginning to measure")
        seconds = computed_s = 0.0
        if self._world.rank == 0:
            sleep(self._settle_s)
            seconds = measure()
            if work is not None:
                with self._world.deadline("stopping a rank that computes", [self.target]):
                    self._ended.put_messages(self._number, messages(self.target, 0, 1))
                    self._ended.flush(self.target)
        elif self._world.rank == self.target and work is not None:
            computed_s = self._compute(work)
        self._meet("ending to measure")
        everyone = self._world.gather_objects((seconds, computed_s))
        return Sample(everyone[0][0], everyone[self.target][1])

    def free(self) -> None:
        """Free the window. Collective."""
        del self._seen
        with self._world.collective("freeing a window"):
            self._ended.free()

    def _compute(self, work: Callable[[], object]) -> float:
        """Compute until rank 0 has measured; return the seconds. Does not communicate."""
        self._world.set_status("computing while rank 0 measures")
        began, computed_s = perf_counter(), 0.0
        with self._world.background_progress_off(), self._world.deadline("computing while rank 0 measures", [0]):
            # A plain load: MPI_Win_sync might make MPI progress, which only the thread may do here.
            while self._seen[0] < self._number[0]:
                work()
                computed_s = perf_counter() - began
        return computed_s

    def _meet(self, what: str) -> None:
        self._world.wait_collective(self._world.comm.Ibarrier(), what)


def find_target(world: World) -> int:
    """Return the rank that rank 0 accesses: the first of another node, or else of the same node. Collective."""
    far = [rank for rank in range(world.size) if rank not in world.node_ranks]
    return world.gather_objects((far or [1])[0])[0]


def take_one_core_each(world: World, first: Collection[int]) -> list[int]:
    """Bind all threads of this rank to one core, and torch to one thread. Collective.

    Otherwise a progress thread would use a free core if there are more cores than ranks, and cost its rank nothing.

    Args:
        first: Ranks that choose before the others, so that they share no core if possible.

    Returns:
        The core of every rank, as numbered by its system.
    """
    torch.set_num_threads(1)
    # Two hosts of network namespaces have one kernel, whose cores they share.
    systems = world.gather_objects((_system(), sorted(os.sched_getaffinity(0))))
    order = [*first, *(rank for rank in range(world.size) if rank not in first)]
    cores: dict[int, int] = {}
    for system in {name for name, _ in systems}:
        ranks = [rank for rank in order if systems[rank][0] == system]
        cores |= dict(zip(ranks, choose_cores([systems[rank][1] for rank in ranks]), strict=True))
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), {cores[world.rank]})
        except OSError:
            continue  # the thread ended meanwhile
    return [cores[rank] for rank in range(world.size)]


def choose_cores(allowed: Sequence[Collection[int]]) -> list[int]:
    """Return a core for each process, of those it may use, shared by as few processes as possible."""
    wanted = Counter(core for cores in allowed for core in cores)
    taken: Counter[int] = Counter()
    chosen = []
    for cores in allowed:
        # Of the free cores, the one that the fewest other processes may use.
        chosen.append(min(cores, key=lambda core: (taken[core], wanted[core], core)))
        taken[chosen[-1]] += 1
    return chosen


def _system() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename

"""Progress thread: processes one-sided operations of other ranks while this rank computes.

Where MPI implements one-sided operations with messages, as between hosts over TCP, they complete only when a thread of
the target enters MPI. The progress thread probes for a message that never arrives, on a communicator of its own, which
drives the progress engine of MPI. It also adds the gradients that wait in the mailbox of this rank.

It sleeps between polls: a thread that spins or blocks in a receive takes half of a core from the rank that computes
(figures: docs/windows.md). Over TCP the kernel wakes it when data arrives (`comm.socket_waiter`).
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from odc_mpi.comm.socket_waiter import SocketWaiter
from odc_mpi.runtime.world import World

#: Sleep between two polls without work: the longest delay of a small operation that no socket reports. 1 ms took 3 to
#: 6 % of two busy ranks on two cores, 0.2 ms took 13 %.
SLEEP_S = 1e-3
#: Later sleeps are this share of the time without work, and at most `IDLE_SLEEP_S`.
IDLE_SHARE = 0.02
IDLE_SLEEP_S = 10e-3
#: A poll that took at least this much CPU time found work, and is repeated without a sleep. An idle poll takes 2 to
#: 5 µs, up to 40 while the rank computes, and rarely more; so a single such poll proves nothing if sockets report data.
#: Wall time would not do, since a poll may wait long for the GIL.
BUSY_POLL_S = 40e-6
#: Polls without a sleep. Bounded: where polling itself is slow, every poll would look like work.
MAX_CONSECUTIVE_POLLS = 100
#: Sleep for `EAGER_S` after work: an operation of many messages would wait for a longer sleep at each.
EAGER_SLEEP_S = 50e-6
EAGER_S = 5e-3
#: Switch interval of the GIL while the thread runs. The default of 5 ms would be added to every poll: a Get of 64 bytes
#: took 7 instead of 3 ms, one of 16 MB 32 instead of 13 (MPICH).
SWITCH_INTERVAL_S = 0.5e-3


class ProgressThread:
    """Background thread that drives the progress of MPI. Construction is collective.

    The switch interval of the interpreter is short while the thread runs. An exception in the thread ends the job.

    Args:
        world: World with MPI_THREAD_MULTIPLE.
        make_progress: Function called at every poll, which returns True if it did work. Its CPU time does not show
            this: without work it takes 50 to 130 µs while the rank computes.
    """

    _num_running: ClassVar[int] = 0
    _usual_switch_interval_s: ClassVar[float]

    def __init__(self, world: World, make_progress: Callable[[], bool]) -> None:
        assert world.job.status is not None
        self._make_progress, self._prepare = make_progress, world.job.status.prepare
        with world.collective("duplicating the communicator of the progress thread"):
            self._comm = world.comm.Dup()
        self._closed = threading.Event()
        if ProgressThread._num_running == 0:
            ProgressThread._usual_switch_interval_s = sys.getswitchinterval()
            sys.setswitchinterval(min(SWITCH_INTERVAL_S, sys.getswitchinterval()))
        ProgressThread._num_running += 1
        self._thread = threading.Thread(target=self._run, name="odc_mpi-progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and free its communicator. Collective. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        ProgressThread._num_running -= 1
        if ProgressThread._num_running == 0:
            sys.setswitchinterval(ProgressThread._usual_switch_interval_s)
        self._comm.Free()

    def _run(self) -> None:
        self._prepare()
        waiter = SocketWaiter()
        last_work, num_polls = time.perf_counter() - IDLE_SLEEP_S / IDLE_SHARE, 0
        while not self._closed.is_set():
            began = time.thread_time()
            self._comm.Iprobe()
            took_s = time.thread_time() - began
            num_polls += 1
            worked = self._make_progress()
            if worked or took_s > BUSY_POLL_S:
                if worked or num_polls > 1 or not waiter.has_sockets:
                    last_work = time.perf_counter()
                if num_polls < MAX_CONSECUTIVE_POLLS:
                    continue
            num_polls = 0
            waiter.wait(_sleep_s(time.perf_counter() - last_work))


def _sleep_s(since_work_s: float) -> float:
    """Return the length of the next sleep."""
    if since_work_s < EAGER_S:
        return EAGER_SLEEP_S
    return min(max(SLEEP_S, IDLE_SHARE * since_work_s), IDLE_SLEEP_S)

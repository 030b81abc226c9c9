"""Progress thread that lets other ranks' one-sided operations complete while this rank computes.

If MPI implements one-sided operations with messages, as between hosts over TCP, they complete only when a thread of
the target enters MPI. The progress thread therefore probes a separate communicator for a message that never arrives,
because each probe drives MPI's progress engine. The thread also adds the gradients in this rank's mailbox to its
shards.

The thread sleeps between polls, since spinning or blocking in a receive would take half a core from the computing rank
(figures: docs/windows.md). Over TCP, the kernel wakes the thread when data arrives (`comm.socket_waiter`).
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from odc_mpi.comm.socket_waiter import SocketWaiter
from odc_mpi.runtime.world import World

#: Sleep after a poll that found no work, in seconds. It delays small operations that no socket reports. On two cores
#: with two busy ranks, polling took 3 to 6 % of the time with 1 ms, and 13 % with 0.2 ms.
SLEEP_S = 1e-3
#: Length of a sleep as a fraction of the time since the last work, but at least `SLEEP_S` and at most `IDLE_SLEEP_S`.
IDLE_SHARE = 0.02
IDLE_SLEEP_S = 10e-3
#: A poll that takes more CPU time than this, in seconds, is assumed to have found work and is repeated without a sleep.
#: A poll without work takes 2 to 5 µs, up to 40 µs while the rank computes, and rarely more. Where sockets report data,
#: a single long poll is therefore no evidence of work.
BUSY_POLL_S = 40e-6
#: Maximum number of polls without a sleep. Where polling itself is slow, every poll would look like one with work.
MAX_CONSECUTIVE_POLLS = 100
#: Sleep between polls in the first `EAGER_S` after work, so that operations with many messages are hardly delayed.
EAGER_SLEEP_S = 50e-6
EAGER_S = 5e-3
#: Switch interval of the GIL while the thread runs. The default of 5 ms would delay every poll by as much: with it, a
#: 64-byte Get took 7 ms instead of 3, and a 16 MB Get took 32 ms instead of 13 (MPICH).
SWITCH_INTERVAL_S = 0.5e-3


class ProgressThread:
    """Background thread that drives MPI progress until `close`. Construction is collective.

    Until the last of these threads is closed, the interpreter's switch interval is at most `SWITCH_INTERVAL_S`. An
    uncaught exception in a thread ends the job.

    Args:
        world: World whose MPI library provides MPI_THREAD_MULTIPLE.
        make_progress: Function that the thread calls on every poll. It must return True if it did any work.
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
            worked = self._make_progress()  # CPU time is no sign: 50 to 130 µs without work while the rank computes
            if worked or took_s > BUSY_POLL_S:
                if worked or num_polls > 1 or not waiter.has_sockets:
                    last_work = time.perf_counter()
                if num_polls < MAX_CONSECUTIVE_POLLS:
                    continue
            num_polls = 0
            waiter.wait(_sleep_s(time.perf_counter() - last_work))


def _sleep_s(since_work_s: float) -> float:
    if since_work_s < EAGER_S:
        return EAGER_SLEEP_S
    return min(max(SLEEP_S, IDLE_SHARE * since_work_s), IDLE_SLEEP_S)

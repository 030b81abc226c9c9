"""Serving others while this rank computes.

Where one-sided operations are carried by messages, as between hosts over TCP, somebody on the target has to enter MPI
for them to be done. A thread does, by asking on a communicator of its own for a message that never comes; asking is
what drives MPI's progress engine. It also does the owner's part of a reduction that leaves it one.

It sleeps between looks, because a thread that spins, or blocks in a receive, takes half of a core from the rank that
computes (docs/windows.md has the figures). Over TCP the kernel wakes it when something comes (`comm.socket_waiter`).
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from odc_mpi.comm.socket_waiter import SocketWaiter
from odc_mpi.runtime.world import World

#: Sleep between two looks when there was nothing to do. What a small operation waits at most if no socket tells of it,
#: and what it costs: 1 ms took 3 to 6 % of two busy ranks on two cores, 0.2 ms took 13 %.
SLEEP_S = 1e-3
#: ... and when there was nothing for longer, so much of that time, but no more than so many seconds.
IDLE_SHARE = 0.02
IDLE_SLEEP_S = 10e-3
#: A look that took this much of the processor found work, so more may be there: look again at once. An idle look takes
#: 2 to 5 µs, beside a rank that computes up to 40, rarely more: where sockets tell what comes, one such look proves
#: nothing. Not the clock on the wall: a look may wait long for Python's lock.
BUSY_POLL_S = 40e-6
#: But so many times in a row at most: where a look itself is slow, every one would pass for work.
MAX_CONSECUTIVE_POLLS = 100
#: After work, look more often for a while: what comes in many pieces would wait for a sleep at each.
EAGER_SLEEP_S = 50e-6
EAGER_S = 5e-3
#: Computing Python code hands over its lock within this time. The interpreter's own 5 ms would be added to every look:
#: a Get of 64 bytes took 7 instead of 3 ms, one of 16 MB 32 instead of 13 (MPICH).
SWITCH_INTERVAL_S = 0.5e-3


class ProgressThread:
    """Drives MPI's progress in the background. Starting and closing one is collective.

    While one runs, the interpreter's switch interval is short. An exception that ends the thread ends the job.

    Args:
        world: The ranks; must have been granted MPI_THREAD_MULTIPLE.
        make_progress: The owner's part of the reduction; called at every look. Returns whether there was something to do: the
            time it takes does not tell, since looking for it alone takes 50 to 130 µs beside a rank that computes.
        prepare: Called once, in the thread, before it looks.
    """

    _num_running: ClassVar[int] = 0
    _usual_switch_interval_s: ClassVar[float]

    def __init__(
        self, world: World, make_progress: Callable[[], bool], prepare: Callable[[], None] = lambda: None
    ) -> None:
        self._make_progress, self._prepare = make_progress, prepare
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
        """Stop and free the communicator. Collective; a second call does nothing."""
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
        arrivals = SocketWaiter()
        worked, looks = time.perf_counter() - IDLE_SLEEP_S / IDLE_SHARE, 0
        while not self._closed.is_set():
            began = time.thread_time()
            self._comm.Iprobe()
            took_s = time.thread_time() - began
            looks += 1
            served = self._make_progress()
            if served or took_s > BUSY_POLL_S:
                if served or looks > 1 or not arrivals.has_sockets:
                    worked = time.perf_counter()
                if looks < MAX_CONSECUTIVE_POLLS:
                    continue
            looks = 0
            arrivals.wait(_sleep_s(time.perf_counter() - worked))


def _sleep_s(since_work_s: float) -> float:
    """Choose how long to sleep, by how long ago there was something to do."""
    if since_work_s < EAGER_S:
        return EAGER_SLEEP_S
    return min(max(SLEEP_S, IDLE_SHARE * since_work_s), IDLE_SLEEP_S)

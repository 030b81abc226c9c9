"""Tasks that a rank runs for operations of other ranks, such as additions to its shards.

Waits that poll (`World.wait`, `wait_collective`, `collective`), fetches from windows and a progress thread
(`comm.progress`) run them, so that no rank waits for a rank that itself only waits.
"""

import threading
from collections.abc import Callable

from mpi4py import MPI


class Progress:
    """Registered tasks for other ranks. Thread-safe."""

    def __init__(self) -> None:
        self._tasks: tuple[Callable[[], bool], ...] = ()
        self._busy = threading.Lock()

    def add(self, task: Callable[[], bool]) -> None:
        """Register a task to be called periodically. It returns True if there was anything to do."""
        self._tasks = (*self._tasks, task)

    def remove(self, task: Callable[[], bool]) -> None:
        """Unregister a task, and wait until no thread runs it. Idempotent."""
        with self._busy:
            self._tasks = tuple(other for other in self._tasks if other != task)

    def run_tasks(self) -> bool:
        """Run all tasks, unless another thread does; return True if there was anything to do."""
        if not self._tasks or not self._busy.acquire(blocking=False):
            return False
        try:
            results = [task() for task in self._tasks]
            return any(results)
        finally:
            self._busy.release()

    def poke(self) -> bool:
        """Enter MPI, since some networks make progress only in MPI calls, and run all tasks."""
        MPI.COMM_WORLD.Iprobe()
        return self.run_tasks()

"""`ProgressSetting`: this rank's part in operations of others, done while it waits.

Every polite wait (`World.wait`, `meet`, `meeting`), every fetch from windows and a progress thread (`comm.progress`)
call it, so that no rank waits for one that itself only waits.
"""

import threading
from collections.abc import Callable

from mpi4py import MPI


class Progress:
    """What is to be done for other ranks. Any thread may call it."""

    def __init__(self) -> None:
        self._tasks: tuple[Callable[[], bool], ...] = ()
        self._busy = threading.Lock()

    def add(self, task: Callable[[], bool]) -> None:
        """Have a task called again and again, which returns whether there was anything to do. Local, as the task is."""
        self._tasks = (*self._tasks, task)

    def remove(self, task: Callable[[], bool]) -> None:
        """Call a task no more, and wait until no thread does. Local; does nothing if it is not there."""
        with self._busy:
            self._tasks = tuple(other for other in self._tasks if other != task)

    def run_tasks(self) -> bool:
        """Do what is to be done; return whether there was anything. Local; does nothing if another thread is at it."""
        if not self._tasks or not self._busy.acquire(blocking=False):
            return False
        try:
            served = [task() for task in self._tasks]
            return any(served)
        finally:
            self._busy.release()

    def poke(self) -> bool:
        """Enter MPI, since over a network nothing arrives or leaves unless somebody does, and `serve`."""
        MPI.COMM_WORLD.Iprobe()
        return self.run_tasks()

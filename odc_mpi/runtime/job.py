"""`Job`: deadlines of all waits, the status of all ranks, and the abort of the job after an error.

    start      start the watchdog thread and install exception hooks; create the status window (collective)
    waits      each has a deadline; a wait that exceeds it ends the job with a message that names the late ranks
    finalize   a rank that leaves aborts the job if others wait in a collective that it will not join; free the window

A process has one `Job`, which all its `World` objects share.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from mpi4py import MPI

from odc_mpi.errors import UserError
from odc_mpi.runtime.abort import abort, install_excepthooks
from odc_mpi.runtime.deadline import Watchdog
from odc_mpi.runtime.lateness import PendingWait, Status, compare, format_late_ranks, format_status, stranded
from odc_mpi.runtime.library import has_thread_serialized, library_name, thread_level
from odc_mpi.runtime.memory import startup_shm_names, unlink
from odc_mpi.runtime.start.pmi import check_launcher
from odc_mpi.runtime.status import StatusWindow

#: Seconds between two readings of the status of all ranks, more than twice the longest pause of a watchdog. A rank
#: without a heartbeat in this time is stopped or dead, and waits that began at the same time have expired, too.
HEARTBEAT_S = 2.5
#: Seconds that a rank waits if a lower rank announces an abort, so that only one rank prints a message.
ABORT_DELAY_S = 5.0


class Progress:
    """Tasks that a rank runs for operations of other ranks, such as additions to its shards. Thread-safe.

    Waits that poll (`World.wait`, `wait_collective`, `collective`), fetches from windows and a progress thread
    (`comm.progress`) run them, so that no rank waits for a rank that itself only waits.
    """

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


class Job:
    """State of this process in the job: deadlines, status and progress tasks.

    Construction raises `UserError` if the launcher and the MPI library do not match.

    Args:
        timeout_s: Maximum duration of a single wait for another rank.
        limit: Name of the setting that defines `timeout_s`, for messages.

    Attributes:
        num_windows: Number of windows of all transports of this process; libraries limit it.
        status: Status window. None while it does not exist; then messages name no late ranks.
    """

    def __init__(self, timeout_s: float, limit: str) -> None:
        try:
            check_launcher(library_name(MPI.Get_library_version()), MPI.COMM_WORLD.Get_size())
        except UserError:
            unlink(startup_shm_names())  # used by this process only, since MPI sees no other
            raise
        self.rank = MPI.COMM_WORLD.Get_rank()
        self.num_windows = 0
        self.progress = Progress()
        self.status: StatusWindow | None = None
        self._limit = limit
        self._main_thread_only = not has_thread_serialized()
        self._hosts: Sequence[str] = ()
        self.watchdog = Watchdog(timeout_s, self._expired, self._heartbeat)
        install_excepthooks()

    def open_status_window(self, comm: MPI.Intracomm, hosts: Sequence[str]) -> None:
        """Create the status window. Collective."""
        self.rank, self._hosts = comm.Get_rank(), hosts
        self.status = StatusWindow(comm)

    def set_status(self, what: str, microbatch: int = 0) -> None:
        """Publish the activity of this rank, as `World.set_status` does."""
        if self.status is not None:
            self.status.page.write(what, microbatch)

    def watch(self, wait: PendingWait) -> AbstractContextManager[None]:
        """Return a context manager with a deadline for a use of MPI; `UserError` in a thread that may not call MPI."""
        if self._main_thread_only and not MPI.Is_thread_main():
            raise UserError(
                f"{wait.what}: MPI allows calls from the main thread only ({thread_level()}), this is thread "
                f"{threading.current_thread().name}: use an MPI library that grants MPI_THREAD_SERIALIZED, and the "
                "default of mpi4py.rc.thread_level"
            )
        return self.watchdog.watch(wait)

    @contextmanager
    def arrival(self, what: str, among: tuple[int, ...] | None = None) -> Iterator[None]:
        """Context manager for the wait in a collective: publish the arrival, and set a deadline.

        Args:
            what: Operation, for messages ("... while <what>").
            among: Ranks of the collective. None for all ranks; these collectives are counted to find late ranks.
        """
        number = 0
        if among is None and self.status is not None:
            number = self.status.page.enter_collective(what)
        else:
            self.set_status(what)
        with self.watch(PendingWait(what, collective=number, among=among)):
            yield
        self.set_status(f"after {what}")

    @contextmanager
    def finalizing(self) -> Iterator[Callable[[], None]]:
        """Context manager for the last collective of all ranks.

        Yields a one-sided function to call periodically. It aborts the job if other ranks wait in a collective that
        this rank will not join.
        """
        assert self.status is not None
        self.status.page.finalizing = True
        with self.arrival("leaving"):
            yield self._check_stranded

    def free_status_window(self) -> None:
        """Free the status window. Collective."""
        status, self.status = self.status, None
        assert status is not None
        status.free()

    def _check_stranded(self) -> None:
        status = self.status
        assert status is not None
        peers = status.read()
        waiting = stranded(status.page.num_collectives, peers)
        if waiting:
            status.page.announce_abort()
            rank = waiting[0]
            text = format_status(rank, self._hosts[rank], peers[rank], time.time())
            self._abort(f"has left while others wait for it: {text}", peers)

    def _expired(self, wait: PendingWait) -> None:
        """Abort the job because a wait has exceeded its deadline. Called from the watchdog thread; does not return."""
        late = "another rank is late, stuck or dead"
        peers: Mapping[int, Status | None] = {}
        status = self.status
        if status is not None:
            status.page.announce_abort()
            first = status.read()
            time.sleep(HEARTBEAT_S)
            peers = status.read()
            late = format_late_ranks(wait, compare(first, peers), self._hosts, time.time())
        waited = f"waited more than {self.watchdog.timeout_s:g} s while {wait.what}"
        self._abort(f"{waited}: {late}; the limit is {self._limit}", peers)

    def _heartbeat(self) -> None:
        status = self.status  # another thread may reset it in `free_status_window`
        if status is not None:
            status.page.heartbeat()

    def _abort(self, message: str, peers: Mapping[int, Status | None]) -> None:
        if any(status and status.aborting for rank, status in peers.items() if rank < self.rank):
            time.sleep(ABORT_DELAY_S)
        abort(f"rank {self.rank} on {MPI.Get_processor_name()} {message}")

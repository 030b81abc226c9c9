"""`Job`, the life of a job: a deadline for every wait, the status of every rank, and the end if it cannot go on.

    begin    a watchdog thread and hooks for exceptions; then a window in which ranks read each other's status
    waits    each within a deadline; a wait that outlasts it ends the job with a message that names the late ranks
    end      a rank that leaves ends the job if others wait in a collective that it will not join

A process has one, which all its groups of ranks (`runtime.world`) share. Communication: the status window is made and
freed collectively by all ranks; the rest is local or one-sided.
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
from odc_mpi.runtime.progress import Progress
from odc_mpi.runtime.start.pmi import check_launcher
from odc_mpi.runtime.status import StatusWindow

#: Seconds between the two readings of the other ranks, more than twice the longest pause of a watchdog. A rank without
#: a heartbeat in this time is stopped or dead, and waits that began together with this one have expired, too.
HEARTBEAT_S = 2.5
#: One message is enough: a rank gives a lower rank that is about to end the job so many seconds to do so.
ABORT_DELAY_S = 5.0


class Job:
    """The life of a job. Local to make; `show` and `free_status_window` are collective.

    Args:
        timeout_s: Seconds that any single wait for another rank may last.
        limit: The setting that this deadline comes from, by its name.

    Raises:
        UserError: The launcher and the MPI library do not fit together.

    Attributes:
        rank: This rank.
        num_windows: Windows that the transports of this process hold; libraries limit their number.
        progress: What this rank does for others while it waits.
        watchdog: Ends the job after a wait that lasts too long.
        status: The status pages of all ranks; None while their window does not exist: then no rank can be named.
    """

    def __init__(self, timeout_s: float, limit: str) -> None:
        try:
            check_launcher(library_name(MPI.Get_library_version()), MPI.COMM_WORLD.Get_size())
        except UserError:
            unlink(startup_shm_names())  # this process's own, as MPI sees no other
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
        """Let the ranks read each other's status from now on. Collective."""
        self.rank, self._hosts = comm.Get_rank(), hosts
        self.status = StatusWindow(comm)

    def set_status(self, what: str, microbatch: int = 0) -> None:
        """See `World.note`."""
        if self.status is not None:
            self.status.page.write(what, microbatch)

    def watch(self, wait: PendingWait) -> AbstractContextManager[None]:
        """Give the enclosed wait, or any other use of MPI, a deadline.

        Raises:
            UserError: MPI does not let this thread call it.
        """
        if self._main_thread_only and not MPI.Is_thread_main():
            raise UserError(
                f"{wait.what}: MPI lets the main thread alone call it ({thread_level()}), this is thread "
                f"{threading.current_thread().name}: expected an MPI library that grants MPI_THREAD_SERIALIZED, and "
                "mpi4py.rc.thread_level at its default"
            )
        return self.watchdog.watch(wait)

    @contextmanager
    def arrival(self, what: str, among: tuple[int, ...] | None = None) -> Iterator[None]:
        """Enclose a wait in a collective operation. Local, but for what it encloses.

        Args:
            what: The operation in words that follow "while".
            among: The ranks that take part. None for all: such operations are counted, by which late ranks are known.
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
        """Enclose the wait in the last collective operation of all ranks. Local, but for what it encloses.

        Yields:
            A function to call now and then: it ends the job if others wait in a collective that this rank will not
            join. One-sided.
        """
        assert self.status is not None
        self.status.page.finalizing = True
        with self.arrival("leaving"):
            yield self._check_stranded

    def free_status_window(self) -> None:
        """Free the status window; nobody is named any more. Collective."""
        status, self.status = self.status, None
        assert status is not None
        status.free()

    def close(self) -> None:
        """Stop the watchdog."""
        self.watchdog.close()

    def _check_stranded(self) -> None:
        status = self.status
        assert status is not None
        peers = status.read()
        waiting = stranded(status.page.num_collectives, peers)
        if waiting:
            status.page.announce_abort()
            rank = waiting[0]
            them = format_status(rank, self._hosts[rank], peers[rank], time.time())
            self._abort(f"has left while others wait for it: {them}", peers)

    def _expired(self, wait: PendingWait) -> None:
        """End the job because a wait has outlasted its deadline. Called from the watchdog's thread; does not return."""
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
        """Called from the watchdog's thread."""
        status = self.status  # `free_status_window` takes it away in another thread
        if status is not None:
            status.page.heartbeat()

    def _abort(self, message: str, peers: Mapping[int, Status | None]) -> None:
        if any(status and status.aborting for rank, status in peers.items() if rank < self.rank):
            time.sleep(ABORT_DELAY_S)
        abort(f"rank {self.rank} on {MPI.Get_processor_name()} {message}")

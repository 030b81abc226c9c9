"""`Job`: deadlines for all waits, the status of all ranks, and the abort of the job after an error.

The status of a rank consists of its current activity and the number of collectives at which it has arrived. A process
has one `Job`, which all of its `World` objects share.
"""

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from mpi4py import MPI

from odc_mpi.errors import UserError
from odc_mpi.runtime.abort import abort, install_excepthooks
from odc_mpi.runtime.deadline import Watchdog, wait_until
from odc_mpi.runtime.failure import report_failure
from odc_mpi.runtime.lateness import (
    MAX_LISTED,
    PendingWait,
    Status,
    format_late_ranks,
    format_status,
    late_ranks,
    mark_missing_heartbeats,
    seconds_until_late,
    stranded_ranks,
)
from odc_mpi.runtime.library import has_thread_multiple, has_thread_serialized, library_name, thread_level
from odc_mpi.runtime.memory import startup_shm_names, unlink
from odc_mpi.runtime.start.pmi import check_launcher
from odc_mpi.runtime.status import MAX_REQUESTS, StatusWindow

#: Interval, in seconds, at which a finalizing rank checks for ranks that are waiting for it in another collective.
STRANDED_POLL_S = 0.5
#: Time between two readings of the status of all ranks, in seconds: more than twice the longest pause of a watchdog. A
#: rank without a heartbeat in this time is stopped or dead. Equally old waits of others expire in the same time.
HEARTBEAT_S = 2.5
#: Maximum duration of a wait for ranks that report progress, as a multiple of the limit for other waits.
MAX_EXTENSION = 10
#: Time for which a rank delays its abort if a lower rank has announced one, in seconds, so that only one rank prints a
#: message after reading the status of all ranks, which takes up to twice `HEARTBEAT_S` and a few seconds.
ABORT_DELAY_S = 12.0
#: Time for which a failed rank waits for the errors of other ranks, in seconds, so that only one of the ranks with the
#: same error prints a traceback.
SAME_ERROR_S = 0.5


class Progress:
    """Tasks that this rank runs for other ranks, such as adding received gradients to its shards.

    Tasks run while this rank waits, while it fetches units, and in a progress thread (setting `comm.progress`), so
    ranks that wait for each other do not deadlock. Thread-safe, but only one thread may add and remove tasks.
    """

    def __init__(self) -> None:
        self._tasks: tuple[Callable[[], bool], ...] = ()
        self._busy = threading.Lock()

    def add(self, task: Callable[[], bool]) -> None:
        """Register a task: a function that is called periodically and returns True if it had anything to do."""
        self._tasks = (*self._tasks, task)

    def remove(self, task: Callable[[], bool]) -> None:
        """Unregister a task, and wait until it is no longer running in another thread. Idempotent."""
        with self._busy:
            self._tasks = tuple(other for other in self._tasks if other != task)

    def run_tasks(self) -> bool:
        """Run all tasks unless another thread is running them. Return True if any task had something to do."""
        if not self._tasks or not self._busy.acquire(blocking=False):
            return False
        try:
            return sum(task() for task in self._tasks) > 0
        finally:
            self._busy.release()

    def poke(self) -> bool:
        """Call MPI_Iprobe, because some networks make progress only within MPI calls, then return `run_tasks()`."""
        MPI.COMM_WORLD.Iprobe()
        return self.run_tasks()


class Job:
    """State of this process in the job: deadlines, status and progress tasks. For the arguments, see `World`.

    Raises `UserError` if the launcher and the MPI library are incompatible.

    Attributes:
        locations: Host of each rank, and its island if there are islands, for error messages.
        status: Status window, or None before creation and after being freed. If None, messages name no late ranks.
    """

    def __init__(self, timeout_s: float, limit: str) -> None:
        try:
            check_launcher(library_name(MPI.Get_library_version()), MPI.COMM_WORLD.Get_size())
        except UserError:
            unlink(startup_shm_names())  # used by this process only, since MPI sees no other
            raise
        self.rank = MPI.COMM_WORLD.Get_rank()
        self.num_models = 0
        self.progress = Progress()
        self.status: StatusWindow | None = None
        self._limit = limit
        self._main_thread_only = not has_thread_serialized()
        self.locations: list[str] = []
        self.watchdog = Watchdog(timeout_s, self._expired, self._heartbeat)
        install_excepthooks(self._reported_by)

    def open_status_window(self, comm: MPI.Intracomm, hosts: Sequence[str]) -> None:
        """Create the status window over the ranks of `comm`, and set `locations` to their `hosts`. Collective."""
        self.rank, self.locations = comm.Get_rank(), list(hosts)
        self.status = StatusWindow(comm)

    def set_status(self, what: str, microbatch: int = 0) -> None:
        """Publish the activity of this rank (see `World.set_status`)."""
        if self.status is not None:
            self.status.page.write(what, microbatch)

    def watch(self, wait: PendingWait) -> AbstractContextManager[None]:
        """Return a context manager that sets a deadline for the MPI operation in its block.

        Raises `UserError` if MPI's thread level does not allow MPI calls from this thread.
        """
        if self._main_thread_only and not MPI.Is_thread_main():
            raise UserError(
                f"{wait.what}: MPI allows calls from the main thread only ({thread_level()}), this is thread "
                f"{threading.current_thread().name}: use an MPI library that grants MPI_THREAD_SERIALIZED, and the "
                "default of mpi4py.rc.thread_level"
            )
        return self.watchdog.watch(wait)

    @contextmanager
    def in_collective(self, what: str, among: tuple[int, ...] | None = None) -> Iterator[None]:
        """Context manager for a collective operation. Publishes this rank's arrival, and sets a deadline.

        `among` contains the ranks that take part, or is None for all ranks of the job. Only collectives of all ranks
        are counted in `Status.num_collectives`.
        """
        number = 0
        if among is None and self.status is not None:
            number = self.status.page.enter_collective(what)
        else:
            self.set_status(what)
        with self.watch(PendingWait(what, collective=number, among=among)):
            yield
        self.set_status(f"after {what}")

    def synchronize_before_finalize(self, comm: MPI.Intracomm) -> None:
        """Wait until all ranks are about to close their worlds. Collective.

        Aborts the job if another rank is waiting in a collective that this rank will not join.
        """
        status = self.status
        assert status is not None
        status.page.finalizing = True
        with self.in_collective("leaving"):
            request = comm.Ibarrier()
            while not wait_until(request.Test, self.progress.run_tasks, patience_s=STRANDED_POLL_S):
                self._check_stranded(status)

    def free_status_window(self) -> None:
        """Free the status window. Collective."""
        status, self.status = self.status, None
        assert status is not None
        status.free()

    def _check_stranded(self, status: StatusWindow) -> None:
        # The next lower rank would be enough: it waits in a collective, finalizes, or is late and will do either.
        peers = status.read(status.nearby)
        waiting = stranded_ranks(status.page.num_collectives, peers)
        if waiting:
            status.page.announce_abort()
            rank = waiting[0]
            text = format_status(rank, self.locations[rank], peers[rank], time.time())
            self._defer_to_lower_rank(status)
            self._abort(f"has left while others wait for it: {text}")

    def _expired(self, wait: PendingWait, waited_s: float) -> float:
        """Abort the job because a wait has exceeded its deadline. Called in the watchdog thread.

        If all ranks that delay the wait report progress, return the seconds by which to extend the deadline instead.
        """
        limit_s, limit = self.watchdog.timeout_s, self._limit
        extensible_s = max(0.0, MAX_EXTENSION * limit_s - waited_s)
        if not extensible_s:
            limit_s, limit = MAX_EXTENSION * limit_s, f"{MAX_EXTENSION} times {limit}"
        owners = "; ".join(
            f"rank {rank} on {self.locations[rank]}" for rank in wait.owners[:MAX_LISTED] if self.locations
        )
        late = f"it waits for {owners}" if owners else "another rank is late, stuck or dead"
        status, peers = self.status, dict[int, Status | None]()
        if status is not None and has_thread_multiple():
            status.page.announce_abort()
            waits_for = [rank for rank in wait.owners if rank != self.rank]
            ranks = waits_for or list(dict.fromkeys([*status.nearby, *status.others]))
            # At once, but only a few ranks, since many waits may expire together.
            first = status.read(ranks[:MAX_REQUESTS])
            if extension_s := self._extension_s(wait, first, limit_s, extensible_s):
                return extension_s
            time.sleep(HEARTBEAT_S)
            self._defer_to_lower_rank(status)
            if len(first) < len(ranks):
                first |= status.read(ranks[MAX_REQUESTS:])
                if extension_s := self._extension_s(wait, first, limit_s, extensible_s):
                    return extension_s
                time.sleep(HEARTBEAT_S)
            peers = mark_missing_heartbeats(first, status.read(first))
            late = format_late_ranks(wait, peers, self.locations, time.time())
        elif status is not None:
            late += f" (other ranks cannot be asked under {thread_level()})"
        message = f"waited more than {limit_s:g} s while {wait.what}: {late}; the limit is {limit}"
        self._report_late(wait, peers, message)
        self._abort(message)
        return 0.0

    def _report_late(self, wait: PendingWait, peers: Mapping[int, Status | None], message: str) -> None:
        """Report the failure of the rank that most likely delays a wait, or that of an unknown rank."""
        unanswered = [rank for rank, status in peers.items() if status is None]
        rank = next(iter(late_ranks(wait, peers) or unanswered), None)
        peer = None if rank is None else peers[rank]
        host = "" if rank is None else self.locations[rank].partition(" ")[0]
        report_failure(f"rank {self.rank} {message}", rank, host, peer.what if peer else "")

    def _extension_s(
        self, wait: PendingWait, peers: Mapping[int, Status | None], limit_s: float, extensible_s: float
    ) -> float:
        """Return the seconds by which to extend a deadline. If not 0, withdraw the announcement of an abort."""
        extension_s = min(extensible_s, seconds_until_late(wait, peers, time.time(), limit_s))
        if extension_s and self.status:
            self.status.page.announce_abort(False)
        return extension_s

    def _reported_by(self, error: BaseException, place: str) -> int | None:
        """Publish an error, and return the lowest nearby rank below this rank that has the same error, or None."""
        status = self.status
        report_failure(error, self.rank, activity=status.page.what if status else "")
        if status is None:
            return None
        text = f"{type(error).__name__}: {error}; {place}"
        what = f"failed: {zlib.crc32(text.encode()):08x}"
        status.page.write(what)
        time.sleep(SAME_ERROR_S)
        same = (rank for rank, peer in status.read(self._lower_ranks(status)).items() if peer and peer.what == what)
        return min(same, default=None)

    def _heartbeat(self) -> None:
        status = self.status  # another thread may reset it in `free_status_window`
        if status is not None:
            status.page.heartbeat()

    def _defer_to_lower_rank(self, status: StatusWindow) -> None:
        """Sleep if a lower rank is about to abort the job, so that only that rank prints a message."""
        peers = status.read(self._lower_ranks(status))
        if any(peer and peer.aborting for peer in peers.values()):
            time.sleep(ABORT_DELAY_S)

    def _lower_ranks(self, status: StatusWindow) -> list[int]:
        return [rank for rank in status.nearby if rank < self.rank]

    def _abort(self, message: str) -> None:
        abort(f"rank {self.rank} on {MPI.Get_processor_name()} {message}")

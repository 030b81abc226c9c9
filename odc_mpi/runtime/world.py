"""`World`: the ranks of a job, or a subset of them, with their communicators and topology.

A world provides the collectives that are used outside training steps. Every wait has a deadline, which `runtime.job`
checks for all worlds of a process.
"""

import atexit
import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from mpi4py import MPI

from odc_mpi.errors import AllRanksUserError, UserError, file_error
from odc_mpi.formatting import truncate_text
from odc_mpi.runtime.deadline import wait_until
from odc_mpi.runtime.job import Job
from odc_mpi.runtime.lateness import PendingWait
from odc_mpi.runtime.library import library_name
from odc_mpi.runtime.memory import check_window_memory, unlink_startup_shm
from odc_mpi.runtime.ranks import limit_finalize

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class World(AbstractContextManager["World"]):
    """The ranks of this job, or a subset of them. Construction is collective.

    As a context manager, a world closes at the end of the block unless the block raises an exception.

    In all methods, `what` describes the operation for messages ("... while <what>"), such as "fetching unit layers.3".

    An uncaught exception in the main thread of any rank, or in a thread of this package, ends all ranks of the job.
    Exceptions in other threads are only printed.

    Args:
        comm: Communicator to duplicate, by default MPI_COMM_WORLD.
        timeout_s: Maximum duration of a single wait for another rank, in seconds. A longer wait ends the job. The limit
            is up to ten times as long while the late ranks publish new activities. Ignored if `job` is given.
        limit: Name of the setting that defines `timeout_s`, for error messages.
        job: Existing `Job` of this process, required if `comm` is a subset of the ranks. By default, a new one, which
            ends when this world closes.

    Raises:
        UserError: `timeout_s` is less than 1, or the launcher and the MPI library are incompatible.

    Attributes:
        local_rank: Index of this process on its node.
        local_size: Number of ranks on this node.
        host_rank: Index of this process on its host. It differs from `local_rank` only if MPI is configured to treat
            every rank as a separate node (MPIR_CVAR_NOLOCAL).
        host_size: Number of ranks on this host.
        node: Index of this node. Nodes are sorted by their lowest rank.
        hosts: Host name of each rank.
        layout: Host name of each node, and the number of ranks on it.
        node_ranks: Ranks on this node, in the order of `local_rank`.
        comm: Duplicate of the argument `comm`. `node_comm` contains only the ranks on this node.
        job: Deadlines, status and progress tasks of this process, shared by all of its worlds.
        progress: Tasks that this rank runs for other ranks while it waits.
        mpi_library: Name and version of the MPI library, such as "MPICH 5.0.2".
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        timeout_s: float = 600.0,
        limit: str = "comm.timeout_s",
        job: Job | None = None,
    ) -> None:
        if not timeout_s >= 1:  # as for comm.timeout_s: healthy ranks may need up to a second to synchronize
            raise UserError(f"timeout_s must be a number of seconds, 1 or more, got {timeout_s!r}")
        self.job = job or Job(timeout_s, limit)
        self.progress = self.job.progress
        self.mpi_library = library_name(MPI.Get_library_version())
        # Ranks in the job by rank of a subset; None for the whole job, where they are the same.
        self._members: tuple[int, ...] | None = None
        with self.deadline("starting up"):
            self._find_ranks(MPI.COMM_WORLD if comm is None else comm)
            if job is None:
                self.job.open_status_window(self.comm, self.hosts)
                unlink_startup_shm(self.node_comm)
            else:
                self._members = tuple(self.comm.allgather(job.rank))
        # A dict as an ordered set.
        self._resources: dict[Callable[[], None], None] = dict.fromkeys([self.comm.Free, self.node_comm.Free])
        self._closed = False
        if job is None:
            self.on_close(self.job.free_status_window)
            atexit.register(self._finalize, os.getpid())

    def split(self, by: str | int) -> "World":
        """Return a new world that contains some of these ranks. Collective unless `by` is "self".

        `by` selects the ranks of the new world: "node" for those on this node, "self" for only this rank, or a number
        for all ranks that pass the same number. The new world closes when this world does.
        """
        if isinstance(by, int):
            comm = MPI.Intracomm(self.comm.Split(by))
            part = World(comm, job=self.job)
            comm.Free()
        else:
            part = World({"node": self.node_comm, "self": MPI.COMM_SELF}[by], job=self.job)
        self.on_close(part.close)
        part.on_close(lambda: self.cancel_on_close(part.close))
        return part

    @property
    def timeout_s(self) -> float:
        """Maximum duration of a single wait, in seconds. Changing it affects only waits that begin afterward."""
        return self.job.watchdog.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self.job.watchdog.timeout_s = seconds

    @property
    def memory_model(self) -> str:
        """Memory model of this MPI library's windows: "unified" or "separate"."""
        assert self.job.status is not None
        return self.job.status.memory_model

    def set_status(self, what: str, microbatch: int = 0) -> None:
        """Publish this rank's activity for the error messages of ranks that time out while waiting for this rank.

        Takes a few microseconds and does not communicate. Thread-safe. `what` describes the activity, such as "forward
        of unit layers.3". `microbatch` is the number of the microbatch, starting at 1, or 0 outside microbatches.
        """
        self.job.set_status(what, microbatch)

    def set_locations(self, locations: Sequence[str]) -> None:
        """Set the text that follows "rank N on" in error messages, initially the host, for each rank of this world."""
        for rank, location in zip(self._members or range(self.size), locations, strict=True):
            self.job.locations[rank] = location

    def prepare_threads(self, prepare: Callable[[], None]) -> None:
        """Set the function, such as `Device.set_current`, that background threads call before they call MPI.

        A progress thread that is already running continues to use the previous function.
        """
        assert self.job.status is not None
        self.job.status.prepare = prepare

    @contextmanager
    def background_progress_off(self) -> Iterator[None]:
        """Context manager that stops the background thread's periodic MPI calls, to measure one-sided progress.

        These calls, which take a few milliseconds twice per second, let other ranks read this rank's status.
        """
        status = self.job.status
        assert status is not None
        status.background_progress = False
        try:
            yield
        finally:
            status.background_progress = True

    def deadline(self, what: str, owners: Iterable[int] = ()) -> AbstractContextManager[None]:
        """Return a context manager that ends the job with an error message if its block takes longer than `timeout_s`.

        `owners` are the ranks whose memory the operation accesses, so only they can delay it. By default, any rank can.
        """
        if self._members is not None:
            owners = [self._members[rank] for rank in owners]
        return self.job.watch(PendingWait(what, tuple(owners), among=self._members))

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Context manager that sets a deadline for a blocking collective operation. Collective.

        All ranks must enter the same operations in the same order. Ranks that have entered fewer of them are reported
        as late. On entry, the ranks synchronize by polling, because they would otherwise spin in the operation on cores
        that late ranks need.
        """
        with self.job.in_collective(what, self._members):
            wait_until(self.comm.Ibarrier().Test, self.progress.run_tasks)
            yield

    def wait(self, request: MPI.Request, what: str) -> None:
        """Wait for a non-blocking operation until the deadline, while running the `progress` tasks.

        A blocking MPI call would spin and thus delay computing ranks if there are more ranks than cores. This method
        pauses between polls. For a collective operation, use `wait_collective` instead.
        """
        with self.deadline(what):
            wait_until(request.Test, self.progress.run_tasks)

    def wait_collective(self, request: MPI.Request, what: str) -> None:
        """Wait for a non-blocking collective operation. Late ranks are determined as in `collective`. Collective."""
        with self.job.in_collective(what, self._members):
            wait_until(request.Test, self.progress.run_tasks)

    def run_on_all(self, function: Callable[[], T]) -> T:
        """Call a function on every rank, and return its result on this rank. Collective.

        The function must not communicate. If it raises `UserError`, or an `OSError` about a file, on any rank, all
        ranks raise `AllRanksUserError` with the message from the lowest such rank.
        """
        result, error = None, None
        try:
            result = function()
        except UserError as raised:
            error = str(raised)
        except OSError as raised:
            error = str(file_error(raised))
        errors = self.gather_objects(error)
        failed = [(rank, message) for rank, message in enumerate(errors) if message is not None]
        if failed:
            rank, message = failed[0]
            raise AllRanksUserError(message if len(failed) == self.size else f"{message} (on rank {rank})")
        return result  # type: ignore[return-value]

    def require_same(self, value: str, what: str) -> None:
        """Raise `AllRanksUserError` on all ranks if `value` differs between ranks. Collective.

        The message contains `what`, a description of the value, and the first line that differs. Only digests
        are communicated unless the values differ.
        """
        digests = self.gather_objects(hashlib.sha256(value.encode(errors="backslashreplace")).digest())
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is None:
            return
        with self.collective(f"comparing {what}"):
            values = [self.comm.bcast(value, root).split("\n") for root in (0, other)]
        pairs = itertools.zip_longest(*values, fillvalue="nothing")
        first, differing = next(pair for pair in pairs if pair[0] != pair[1])
        raise AllRanksUserError(
            f"{what} differs between ranks: rank {other} has {truncate_text(differing.strip(), 120)}, rank 0 has "
            f"{truncate_text(first.strip(), 120)}"
        )

    def cores_per_rank(self) -> int:
        """Return the number of cores per rank on which this host's ranks may run, but at least 1. Collective."""
        masks = self.gather_objects(os.sched_getaffinity(0))
        this_host = self.hosts[self.rank]
        cores = set().union(*(mask for mask, host in zip(masks, self.hosts, strict=True) if host == this_host))
        return max(1, len(cores) // self.host_size)

    def gather_objects(self, value: T) -> list[T]:
        """Gather picklable values from all ranks in rank order. Collective. Do not use this in training steps."""
        with self.collective("gathering from all ranks"):
            return self.comm.allgather(value)

    def scatter_objects(self, values: Sequence[T] | None, root: int) -> T:
        """Return this rank's one of the picklable `values`, one per rank, that rank `root` passes. Collective."""
        with self.collective(f"receiving from rank {root}"):
            return self.comm.scatter(values, root)

    def broadcast(self, tensor: "torch.Tensor") -> None:
        """Overwrite a contiguous CPU tensor with that of rank 0. Raise `ValueError` for other tensors. Collective."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"broadcast needs a contiguous CPU tensor, got {tensor.device}, strides {tensor.stride()}")
        # Imported late: `odc-mpi doctor` and invalid settings need ranks, but not torch, whose import takes a second.
        import torch

        if tensor.numel():
            data = tensor.detach().reshape(-1).view(torch.uint8).numpy()
            with self.collective("broadcasting from rank 0"):
                # In messages of less than 2 GiB: counts are 32-bit integers in many MPI libraries.
                for start in range(0, data.size, 1 << 30):
                    self.comm.Bcast(data[start : start + (1 << 30)], root=0)

    def require_shared_memory(self, num_bytes: int, what: str) -> None:
        """Raise `AllRanksUserError` on all ranks if any node has too little memory for its ranks' windows. Collective.

        This rank's windows have a total size of `num_bytes` bytes. `what` describes the windows.
        """
        total = np.array([min(num_bytes, 1 << 50)], dtype=np.int64)  # the sum of all ranks must not overflow
        with self.collective("summing the required shared memory"):
            self.node_comm.Allreduce(MPI.IN_PLACE, total)
        self.run_on_all(lambda: check_window_memory(int(total[0]), self.local_size, what))

    def on_close(self, free: Callable[[], None]) -> None:
        """Register a function that frees a resource when this world closes. The last registered function runs first.

        If the resource is freed earlier, call `cancel_on_close`, because the world keeps a reference to the function.
        """
        self._resources[free] = None

    def cancel_on_close(self, free: Callable[[], None]) -> None:
        """Unregister a function that was registered with `on_close`. Idempotent."""
        self._resources.pop(free, None)

    def close(self) -> None:
        """Free the registered resources, then the communicators. Collective. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._members is None:
            self.job.synchronize_before_finalize(self.comm)
        with self.deadline("closing the world"):
            while self._resources:
                self._resources.popitem()[0]()
        if self._members is None:
            self.job.watchdog.close()

    def __exit__(self, kind: object, *_: object) -> None:
        # After an exception the other ranks do not close the world, so this collective call would hang.
        if kind is None:
            self.close()

    def _finalize(self, pid: int) -> None:
        """Close the world when the program ends, and set a time limit for MPI_Finalize, which runs later."""
        if os.getpid() == pid:  # not in a forked child
            try:
                self.close()
            finally:
                limit_finalize(self.timeout_s)

    def _find_ranks(self, comm: MPI.Intracomm) -> None:
        """Duplicate the communicator, split it by node, and set the attributes that describe the ranks. Collective."""
        self.comm = comm.Dup()
        self.rank = self.comm.Get_rank()
        self.size = self.comm.Get_size()
        self.node_comm = MPI.Intracomm(self.comm.Split_type(MPI.COMM_TYPE_SHARED))
        self.local_rank = self.node_comm.Get_rank()
        self.local_size = self.node_comm.Get_size()
        # The lowest rank of a node identifies it.
        leader = self.node_comm.bcast(self.rank)
        everyone = self.comm.allgather((leader, MPI.Get_processor_name()))
        self.node_ranks = self.node_comm.allgather(self.rank)
        self.hosts = [host for _, host in everyone]
        leaders = sorted({leader for leader, _ in everyone})
        self.node = leaders.index(leader)
        self.host_rank = self.hosts[: self.rank].count(self.hosts[self.rank])
        self.host_size = self.hosts.count(self.hosts[self.rank])
        self.num_nodes = len(leaders)
        ranks = Counter(leader for leader, _ in everyone)
        self.layout = [(self.hosts[leader], ranks[leader]) for leader in leaders]

"""`World`, the ranks of a job and where they are: communicators, ranks, nodes; the whole job, or a part of it.

Communication: creating a `World` is collective (a duplicate of the communicator, a split by node). Afterwards a world
offers the few collectives that happen outside the training step: `run_on_all` and `broadcast` at start-up, `gather_objects`
at the end. Every wait in them has a deadline, which `runtime.job` watches for all worlds of a process.
"""

import atexit
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from mpi4py import MPI

from odc_mpi.errors import AllRanksUserError, UserError, file_error
from odc_mpi.runtime.deadline import wait_until
from odc_mpi.runtime.job import Job
from odc_mpi.runtime.lateness import PendingWait
from odc_mpi.runtime.library import library_name
from odc_mpi.runtime.memory import check_shm_capacity, unlink_own_startup_shm, unlink_startup_shm
from odc_mpi.runtime.progress import Progress
from odc_mpi.runtime.start.limits import end_within
from odc_mpi.runtime.topology import Topology

if TYPE_CHECKING:
    import torch

# A part of MPI's start, which the import of mpi4py is: a process need not make a world.
if MPI.Is_initialized():
    unlink_own_startup_shm(MPI.COMM_WORLD)

T = TypeVar("T")

#: Seconds between checks of a rank that leaves for ranks that wait for it in another collective.
STRANDED_POLL_S = 0.5


class World(Topology, AbstractContextManager["World"]):
    """The ranks of this job, or some of them. Creating a world is collective.

    Which ranks, and where they are, tell the attributes of `runtime.topology.Topology`: `rank`, `size`, `node`, ...

    An exception that leaves the main program on any rank ends the whole job with that rank's traceback; without this
    the other ranks would wait for ever. So does one that ends a thread of this package, but not a thread of the user's.

    Args:
        comm: Communicator to duplicate; all ranks of the job by default.
        timeout_s: Seconds that any single wait for another rank may last before the job ends with an error.
        limit: The setting to name in that error.
        job: The life of the job that the ranks are a part of. By default the ranks are all of a job that begins here
            and ends when this world closes.

    Attributes:
        job: The life of the job, of which there is one in a process.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        timeout_s: float = 600.0,
        limit: str = "comm.timeout_s",
        job: Job | None = None,
    ) -> None:
        if not timeout_s >= 1:  # as for comm.timeout_s: less is over before ranks that are well have met
            raise UserError(f"timeout_s must be a number of seconds, 1 or more, got {timeout_s!r}")
        self.job = job or Job(timeout_s, limit)
        # The job's numbers of a part's ranks; None for the whole job, which has the same.
        self._members: tuple[int, ...] | None = None
        with self.deadline("starting up"):
            super().__init__(MPI.COMM_WORLD if comm is None else comm)
            if job is None:
                self.job.open_status_window(self.comm, self.hosts)
                unlink_startup_shm(self.node_comm)
            else:
                self._members = tuple(self.comm.allgather(job.rank))
        # In order, as keys.
        self._resources: dict[Callable[[], None], None] = dict.fromkeys([self.comm.Free, self.node_comm.Free])
        self._closed = False
        if job is None:
            self.on_close(self.job.free_status_window)
            atexit.register(self._finalize)

    def split(self, by: str) -> "World":
        """Return a world of the ranks that share something with this one; waits for them have the same limit.

        Collective, as is closing that world; it closes with this world at the latest.

        Args:
            by: node.

        Raises:
            ValueError: The ranks cannot be split like that.
        """
        if by != "node":
            raise ValueError(f"split: expected node, got {by!r}")
        return self._sub_world(self.node_comm)

    def self_world(self) -> "World":
        """Return a world of this rank only, with the same limit. Local; it closes with this world at the latest."""
        return self._sub_world(MPI.COMM_SELF)

    @property
    def timeout_s(self) -> float:
        """Seconds that any single wait may last; may be set, for waits that begin later."""
        return self.job.watchdog.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self.job.watchdog.timeout_s = seconds

    @property
    def progress(self) -> Progress:
        """What this rank does for others while it waits."""
        return self.job.progress

    @property
    def mpi_library(self) -> str:
        """Name and version of the MPI library, in one short line."""
        return library_name(MPI.Get_library_version())

    @property
    def memory_model(self) -> str:
        """Memory model of the windows of this MPI library: unified or separate."""
        assert self.job.status is not None
        return self.job.status.memory_model

    def set_status(self, what: str, microbatch: int = 0) -> None:
        """Publish the activity of this rank, for the message of a rank whose wait for this one expires.

        Takes a few microseconds. Any thread may call it.

        Args:
            what: Words that follow "was last seen", such as "forward of unit layers.3".
            microbatch: Number of the microbatch in this minibatch, from 1; 0 outside of microbatches.
        """
        self.job.set_status(what, microbatch)

    def prepare_threads(self, prepare: Callable[[], None]) -> None:
        """Have a function run in this world's own thread before the thread calls MPI, such as choosing a GPU."""
        assert self.job.status is not None
        self.job.status.prepare = prepare

    @contextmanager
    def background_progress_off(self) -> Iterator[None]:
        """Enclose a measurement of one-sidedness: no thread of this rank enters MPI by itself meanwhile.

        At other times a thread enters MPI twice a second for some milliseconds, so that others can read the status.
        """
        status = self.job.status
        assert status is not None
        status.background_progress = False
        try:
            yield
        finally:
            status.background_progress = True

    def deadline(self, what: str, owners: Iterable[int] = ()) -> AbstractContextManager[None]:
        """Give the enclosed wait at most `timeout_s`; beyond it the job ends and says what this rank was doing.

        Args:
            what: The operation in words that follow "while", such as "fetching unit layers.3".
            owners: The ranks whose memory the operation needs; by default any.
        """
        if self._members is not None:
            owners = [self._members[rank] for rank in owners]
        return self.job.watch(PendingWait(what, tuple(owners), among=self._members))

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Enclose a blocking collective operation in a deadline, whose message names the late ranks.

        Collective: all ranks have the same meetings in the same order, by which late ranks are known. The ranks meet
        before the operation, so that no rank spins in it on a core that a late rank may need.

        Args:
            what: The operation in words that follow "while", such as "allocating a window".
        """
        with self.job.arrival(what, self._members):
            wait_until(self.comm.Ibarrier().Test, self.progress.run_tasks)
            yield

    def wait(self, request: MPI.Request, what: str) -> None:
        """Wait for a non-blocking operation within the deadline, leaving the core to others.

        A blocking call would spin: with more ranks than cores it would take time from a rank that computes. Meanwhile
        this rank serves others (`progress`). For a collective operation see `meet`.

        Args:
            request: The request of the operation.
            what: The operation in words that follow "while".
        """
        with self.deadline(what):
            wait_until(request.Test, self.progress.run_tasks)

    def wait_collective(self, request: MPI.Request, what: str) -> None:
        """Wait for a non-blocking collective operation as `wait` does; a `collective` as well. Collective."""
        with self.job.arrival(what, self._members):
            wait_until(request.Test, self.progress.run_tasks)

    def run_on_all(self, function: Callable[[], T]) -> T:
        """Call a local function on every rank and fail together. Collective.

        Args:
            function: The function; it must not communicate.

        Returns:
            The result of the function on this rank.

        Raises:
            AgreedError: On every rank, if the function raised `UserError` on any, or could not use a file: with the
                message of the lowest such rank.
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
        """Check that all ranks have the same value. Collective; for start-up.

        Args:
            value: The value of this rank.
            what: Name of the value, for the message.

        Raises:
            AgreedError: On every rank; names the first rank whose value differs from rank 0's.
        """
        values = self.gather_objects(value)
        differing = [rank for rank in range(self.size) if values[rank] != values[0]]
        if differing:
            raise AllRanksUserError(
                f"{what}: expected the same on every rank, rank {differing[0]} has another than rank 0"
            )

    def cores_per_rank(self) -> int:
        """Return the number of cores of this host for each of its ranks, at least 1. Collective."""
        masks = self.gather_objects(os.sched_getaffinity(0))
        own = self.hosts[self.rank]
        cores = set().union(*(mask for mask, host in zip(masks, self.hosts, strict=True) if host == own))
        return max(1, len(cores) // self.host_size)

    def gather_objects(self, value: T) -> list[T]:
        """Give every rank every rank's value, in rank order. Collective; for start-up and the end, not for steps."""
        with self.collective("gathering from all ranks"):
            return self.comm.allgather(value)

    def broadcast(self, tensor: "torch.Tensor") -> None:
        """Overwrite a contiguous host tensor of any dtype with rank 0's. Collective.

        Raises:
            ValueError: The tensor is not contiguous or not on the host.
        """
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"broadcast needs a contiguous CPU tensor, got {tensor.device}, strides {tensor.stride()}")
        # Not at the top: `odc-mpi doctor` and a mistake in the settings need ranks, but no torch, which takes a second.
        import torch

        if tensor.numel():
            data = tensor.detach().reshape(-1).view(torch.uint8).numpy()
            with self.collective("broadcasting from rank 0"):
                # Pieces below 2 GiB: a count in MPI is an int in many libraries.
                for start in range(0, data.size, 1 << 30):
                    self.comm.Bcast(data[start : start + (1 << 30)], root=0)

    def require_shared_memory(self, num_bytes: int, what: str) -> None:
        """Check that /dev/shm has room for the windows of this node's ranks. Collective.

        Args:
            num_bytes: Bytes for this rank.
            what: Their purpose in words that follow "room for".

        Raises:
            UserError: There is too little; raised on every rank.
        """
        wanted = np.array([num_bytes], dtype=np.int64)
        with self.collective("adding up the shared memory that is wanted"):
            self.node_comm.Allreduce(MPI.IN_PLACE, wanted)
        self.run_on_all(lambda: check_shm_capacity(int(wanted[0]), self.local_size, what))

    def on_close(self, free: Callable[[], None]) -> None:
        """Register a function that frees a resource when this world closes, the last registered first.

        A resource that is freed before has to be forgotten (`forget`), or it would be kept.
        """
        self._resources[free] = None

    def cancel_on_close(self, free: Callable[[], None]) -> None:
        """Take back `on_close`, of the same function. Local; does nothing if it was taken back."""
        self._resources.pop(free, None)

    def close(self) -> None:
        """Free the registered resources, then the communicators. Collective; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._members is None:
            self._synchronize_before_finalize()
        with self.deadline("closing the world"):
            while self._resources:
                self._resources.popitem()[0]()
        if self._members is None:
            self.job.close()

    def __exit__(self, kind: object, *_: object) -> None:
        # After an exception the other ranks are elsewhere: closing, which is collective, would hang.
        if kind is None:
            self.close()

    def _finalize(self) -> None:
        """Called when the program ends; what is left for it is MPI_Finalize."""
        self.close()
        end_within(self.timeout_s)

    def _sub_world(self, comm: MPI.Intracomm) -> "World":
        part = World(comm, job=self.job)
        self.on_close(part.close)
        part.on_close(lambda: self.cancel_on_close(part.close))
        return part

    def _synchronize_before_finalize(self) -> None:
        with self.job.finalizing() as check_stranded:
            request = self.comm.Ibarrier()
            while not wait_until(request.Test, self.progress.run_tasks, patience_s=STRANDED_POLL_S):
                check_stranded()

"""Start-up: the own communicator, ranks, nodes, and the end of a job that cannot go on.

Communication: creating a `World` is collective (a duplicate of the communicator, a split by node). Afterwards it offers
the few collectives that happen outside the training step: `agree` and `broadcast` at start-up, `gather_objects` at the
end.
"""

import atexit
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from mpi4py import MPI

from odc_mpi.comm.deadline import Watchdog
from odc_mpi.errors import AgreedError, UserError

T = TypeVar("T")

#: A wait polls without pause for this long (a boundary among punctual ranks takes tens of microseconds) ...
SPIN_S = 200e-6
#: ... then sleeps between looks, so that a waiting rank leaves its core to those that compute.
SLEEP_S = 200e-6
#: MPI_Abort itself may hang on a broken network: after this the process ends by itself.
ABORT_GRACE_S = 10.0


class World:
    """The ranks of this job. Creating one is collective.

    An exception that leaves the main program on any rank ends the whole job with that rank's traceback; without this
    the other ranks would wait for ever.

    Args:
        comm: Communicator to duplicate; all ranks of the job by default.
        timeout_s: Seconds that any single wait for another rank may last before the job ends with an error.

    Attributes:
        rank: This process's number in the job, from 0.
        size: Number of ranks.
        local_rank: This process's number on its node, from 0.
        local_size: Ranks on this node.
        node: This node's number, from 0, in the order of its lowest rank.
        num_nodes: Nodes of the job.
        node_ranks: The ranks of this node, by local rank.
        comm: All ranks; this world's own.
        node_comm: The ranks of this node.
    """

    def __init__(self, comm: MPI.Intracomm | None = None, *, timeout_s: float = 600.0) -> None:
        if not timeout_s > 0:
            raise UserError(f"timeout_s must be a number of seconds above 0, got {timeout_s!r}")
        _check_launcher()
        self._watchdog = Watchdog(timeout_s, self._expired)
        self.rank = MPI.COMM_WORLD.Get_rank()  # for the message of a deadline before the communicator is there
        _install_excepthook()
        with self.deadline("starting up"):
            self.comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
            self.rank = self.comm.Get_rank()
            self.size = self.comm.Get_size()
            self.node_comm = MPI.Intracomm(self.comm.Split_type(MPI.COMM_TYPE_SHARED))
            self.local_rank = self.node_comm.Get_rank()
            self.local_size = self.node_comm.Get_size()
            # The lowest rank of each node stands for it.
            leader = self.node_comm.bcast(self.rank)
            leaders = sorted(set(self.comm.allgather(leader)))
            self.node_ranks = self.node_comm.allgather(self.rank)
        self.node = leaders.index(leader)
        self.num_nodes = len(leaders)
        if self.local_rank == 0:
            _unlink_startup_memory()
        self._resources: list[Callable[[], None]] = []
        self._closed = False
        atexit.register(self.close)

    @property
    def timeout_s(self) -> float:
        """Seconds that any single wait may last; may be set, for waits that begin later. Local."""
        return self._watchdog.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._watchdog.timeout_s = seconds

    @property
    def mpi_library(self) -> str:
        """Name and version of the MPI library, in one short line. Local."""
        return library_name(MPI.Get_library_version())

    def deadline(self, what: str) -> AbstractContextManager[None]:
        """Give the enclosed wait at most `timeout_s`; beyond it the job ends and says what this rank was doing. Local.

        Args:
            what: What is waited for, to follow "while", such as "fetching unit layers.3".
        """
        return self._watchdog.watch(what)

    def wait(self, request: MPI.Request, what: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait for a non-blocking operation within the deadline, leaving the core to others. Local.

        A blocking call would spin: with more ranks than cores it would take time from a rank that computes.

        Args:
            request: Of the operation.
            what: What is waited for, to follow "while".
            meanwhile: Called again and again while this rank waits.
        """
        with self.deadline(what):
            start = time.perf_counter()
            while not request.Test():
                meanwhile()
                if time.perf_counter() - start > SPIN_S:
                    time.sleep(SLEEP_S)

    def agree(self, function: Callable[[], T]) -> T:
        """Call a local function on every rank and fail together. Collective.

        Args:
            function: Must not communicate.

        Returns:
            What it returned on this rank.

        Raises:
            AgreedError: On every rank, if any raised `UserError`: with the message of the lowest such rank.
        """
        result, error = None, None
        try:
            result = function()
        except UserError as raised:
            error = str(raised)
        errors = self.gather_objects(error)
        failed = [(rank, message) for rank, message in enumerate(errors) if message is not None]
        if failed:
            rank, message = failed[0]
            raise AgreedError(message if len(failed) == self.size else f"{message} (on rank {rank})")
        return result  # type: ignore[return-value]

    def require_same(self, value: str, what: str) -> None:
        """Check that all ranks have the same. Collective; for start-up.

        Args:
            value: This rank's.
            what: For the message.

        Raises:
            AgreedError: On every rank, naming the first that differs from rank 0.
        """
        values = self.gather_objects(value)
        differing = [rank for rank in range(self.size) if values[rank] != values[0]]
        if differing:
            raise AgreedError(f"{what}: expected the same on every rank, rank {differing[0]} has another than rank 0")

    def cores_per_rank(self) -> int:
        """Return how many of the cores that the ranks of this node may use fall to each, at least 1. Collective."""
        masks = self.gather_objects((self.node, os.sched_getaffinity(0)))
        cores = set().union(*(mask for node, mask in masks if node == self.node))
        return max(1, len(cores) // self.local_size)

    def gather_objects(self, value: T) -> list[T]:
        """Give every rank every rank's value, in rank order. Collective; for start-up and the end, not for steps."""
        with self.deadline("gathering from all ranks"):
            return self.comm.allgather(value)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a contiguous host tensor of any dtype with rank 0's. Collective.

        Raises:
            ValueError: The tensor is not contiguous or not on the host.
        """
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"broadcast needs a contiguous CPU tensor, got {tensor.device}, strides {tensor.stride()}")
        if tensor.numel():
            data = tensor.detach().reshape(-1).view(torch.uint8).numpy()
            with self.deadline("broadcasting from rank 0"):
                # Pieces below 2 GiB: a count in MPI is an int in many libraries.
                for start in range(0, data.size, 1 << 30):
                    self.comm.Bcast(data[start : start + (1 << 30)], root=0)

    def require_shared_memory(self, num_bytes: int, what: str) -> None:
        """Check that /dev/shm has room for what the ranks of this node want to put there. Collective.

        Args:
            num_bytes: Wanted by this rank.
            what: What for, to follow "room for".

        Raises:
            UserError: There is too little; raised on every rank.
        """
        wanted = np.array([num_bytes], dtype=np.int64)
        with self.deadline("adding up the shared memory that is wanted"):
            self.node_comm.Allreduce(MPI.IN_PLACE, wanted)
        self.agree(lambda: _check_shared_memory(int(wanted[0]), self.local_size, what))

    def on_close(self, free: Callable[[], None]) -> None:
        """Have a resource freed when this world closes, in reverse order of registration. Local."""
        self._resources.append(free)

    def close(self) -> None:
        """Free what was registered, then the communicators. Collective; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        with self.deadline("closing the world"):
            while self._resources:
                self._resources.pop()()
            self.node_comm.Free()
            self.comm.Free()
        self._watchdog.close()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # After an exception the other ranks are elsewhere: closing, which is collective, would hang.
        if error is None:
            self.close()

    def _expired(self, what: str) -> None:
        abort(
            f"rank {self.rank} on {MPI.Get_processor_name()} waited more than {self.timeout_s:g} s while {what}: "
            "another rank is late, stuck or dead (the limit is comm.timeout_s)"
        )


def abort(message: str, code: int = 1) -> None:
    """End every rank of the job now, whatever they are doing. Local to call; does not return."""
    print(f"odc_mpi: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    timer = threading.Timer(ABORT_GRACE_S, os._exit, args=(code,))
    timer.daemon = True
    timer.start()
    MPI.COMM_WORLD.Abort(code)


def library_name(version: str) -> str:
    """Shorten what MPI_Get_library_version says to a name and a version. Local.

    The two libraries say it differently: "MPICH Version:      5.0.2" and more lines, "Open MPI v5.0.11, package: ...".
    """
    words = version.replace("Version:", "").replace(",", " ").split("\n")[0].split()
    end = next((i for i, word in enumerate(words) if any(c.isdigit() for c in word)), len(words) - 1)
    return " ".join(words[: end + 1])


def _unlink_startup_memory() -> None:
    """Remove the names of what MPICH mapped at its start; every rank of the node has it open by now. Local.

    MPICH removes them itself, but only in MPI_Finalize: a job that was killed or aborted would leave megabytes in
    /dev/shm each time. Its windows have no names from the beginning.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for name in {line.split()[-1] for line in lines if re.search(r"/dev/shm/mpich_shm_\w+$", line)}:
        with suppress(OSError):
            Path(name).unlink()


def _check_launcher() -> None:
    """Notice a launcher that belongs to another MPI, under which every process believes to be rank 0 of 1. Local."""
    sizes = {name: int(os.environ.get(name) or 1) for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")}
    name, size = max(sizes.items(), key=lambda item: item[1])
    if size > 1 and MPI.COMM_WORLD.Get_size() == 1:
        raise UserError(
            f"the launcher started {size} processes ({name}), but {library_name(MPI.Get_library_version())} sees 1: "
            "use the mpiexec of the MPI library that this Python environment has"
        )


def _check_shared_memory(wanted: int, local_size: int, what: str) -> None:
    # One rank on a node needs no memory that others can see: MPI takes it from the heap.
    if local_size == 1:
        return
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return  # Not every system keeps shared memory there; MPI will find its own place or say so.
    if wanted > free:
        raise UserError(
            f"/dev/shm has {free >> 20} MiB free, expected at least {wanted >> 20} MiB as room for {what} of this "
            f"node's {local_size} ranks: enlarge it (docker --shm-size, mount -o remount,size=...) or use more nodes"
        )


def _install_excepthook() -> None:
    """Let an exception that leaves the main program end the job, after whoever reported it before. Local."""
    report = sys.excepthook
    if MPI.COMM_WORLD.Get_size() == 1 or getattr(report, "ends_the_job", False):
        return

    def report_and_abort(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> Any:
        if MPI.Is_finalized():
            return report(kind, error, tb)
        print(f"odc_mpi: rank {MPI.COMM_WORLD.Get_rank()} failed:", file=sys.stderr)
        report(kind, error, tb)
        return abort("ending all ranks")

    report_and_abort.ends_the_job = True  # type: ignore[attr-defined]
    sys.excepthook = report_and_abort

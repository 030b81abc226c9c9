"""Group of ranks across which parameters are sharded, with their synchronization points.

The collectives are non-blocking, and ranks sleep between polls for completion. MPI is imported only for type checking,
because transports without MPI use this module as well.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from mpi4py import MPI

    from odc_mpi.comm.islands.islands import Islands
    from odc_mpi.comm.progress import ProgressThread
    from odc_mpi.comm.transport import ShardStorage
    from odc_mpi.runtime.world import World


class Group:
    """Ranks across which the parameters are sharded, with their collective operations.

    All ranks of `world` take part in the collectives.

    Args:
        progress: If True, a background thread drives MPI progress (`comm.progress`).
        islands: Islands of `world`, which share one model.

    Attributes:
        rank, size: Those of `world`.
        num_islands: Number of islands, or 1 if there are none.
        num_collectives: Number of synchronization points so far.
    """

    num_islands = 1
    num_collectives = 0

    def __init__(self, world: "World", *, progress: bool = False, islands: "Islands | None" = None) -> None:
        self.world = world
        self.rank, self.size = world.rank, world.size
        if islands is not None:
            self.num_islands = islands.size
        self._islands = islands
        self._wants_progress = progress
        self._progress: ProgressThread | None = None

    def reserve(self, plan: Callable[[], int]) -> None:
        """Call `plan` on every rank and check that each node has enough shared memory for its ranks. Collective.

        `plan` returns the number of bytes that this rank needs. Raises `AllRanksUserError` on every rank if the check
        fails or `plan` raises `UserError`, or an `OSError` about a file, on any rank.
        """
        num_bytes = self.world.run_on_all(plan)
        if num_bytes:
            others = self.world.job.num_models
            beside = f" (beside those of {others} other models, which close() frees)" if others else ""
            self.world.require_shared_memory(num_bytes, f"the parameter and gradient windows{beside}")

    def open(self, close: Callable[[], None]) -> None:
        """Start the progress thread, if the group uses one, and synchronize all ranks. Collective.

        `close` is called when the `World` closes, unless `free` has already been called.
        """
        self.world.on_close(close)
        self._close = close
        self.world.job.num_models += 1
        # Each collective has its own communicator. A rank that skips a collective therefore waits in the next one until
        # the deadline, whose message names it, instead of receiving the numbers of another collective.
        with self.world.collective("duplicating the communicator"):
            self._comms = [self.world.comm.Dup() for _ in range(4)]
        self._values_comm, self._gradients_comm, self._norm_comm, self._publish_comm = self._comms
        if self._wants_progress:
            from odc_mpi.comm.progress import ProgressThread

            self._progress = ProgressThread(self.world, self.world.progress.run_tasks)
        self.parameters_published()

    def gather_values(self, values: np.ndarray) -> np.ndarray:
        """Gather float64 values of all ranks, each `[k]`, into an array `[size, k]`. Collective."""
        return self._allgather(self._values_comm, values, "synchronizing at values_gathered")

    def gradients_complete(self, report: np.ndarray) -> np.ndarray:
        """Gather the float64 reports of all ranks, each `[k]`, into an array `[size, k]`. Collective."""
        return self._allgather(self._gradients_comm, report, "synchronizing at gradients_complete")

    def norm(self, values: np.ndarray) -> np.ndarray:
        """Return the sums of `values`, float64 `[k]`, over all ranks. Bitwise identical on every rank. Collective."""
        # Not an all-reduce, whose order of addition differs from rank to rank in some libraries.
        return self._allgather(self._norm_comm, values, "synchronizing at grad_norm").sum(axis=0)

    def parameters_published(self) -> None:
        """Wait until all ranks have published their parameters. Collective."""
        self.num_collectives += 1
        self.world.wait_collective(self._publish_comm.Ibarrier(), "synchronizing at parameters_published")

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite `tensor`, a contiguous CPU tensor, with rank 0's tensor. Collective."""
        self.world.broadcast(tensor)

    def free(self, storages: Sequence["ShardStorage"]) -> None:
        """Stop the progress thread, free the storages in reverse order, and close the islands. Collective."""
        with self.world.collective("freeing the windows"):
            if self._progress is not None:
                self._progress.close()
            for storage in reversed(storages):
                storage.free()
            for comm in self._comms:
                comm.Free()
            if self._islands is not None:
                self._islands.close()
        self._progress = None
        self.world.job.num_models -= 1
        self.world.cancel_on_close(self._close)

    def _allgather(self, comm: "MPI.Intracomm", values: np.ndarray, what: str) -> np.ndarray:
        self.num_collectives += 1
        values = np.ascontiguousarray(values, dtype=np.float64)
        gathered = np.empty((self.world.size, values.size))
        self.world.wait_collective(comm.Iallgather(values, gathered), what)
        return gathered

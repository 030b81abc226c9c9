"""Group of all ranks in a `World`. Its MPI collectives are non-blocking, and ranks sleep between polls for completion.

`gradients_complete` and `norm` are all-gathers of a few numbers, and `parameters_published` is a barrier.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from mpi4py import MPI
from typing_extensions import override

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.progress import ProgressThread
from odc_mpi.comm.shard_storage import ShardStorage
from odc_mpi.comm.transport import Group
from odc_mpi.runtime.world import World


class WorldGroup(Group):
    """Group of all ranks in a `World`. If `progress` is True, a background thread drives MPI progress.

    If `islands` are given, they share one model.
    """

    def __init__(self, world: World, *, progress: bool = False, islands: Islands | None = None) -> None:
        self.rank, self.size = world.rank, world.size
        self._islands = islands
        self.num_islands = islands.size if islands else 1
        self._island = WorldGroup(islands.island) if islands else self
        self._world = world
        self._wants_progress = progress
        self._progress: ProgressThread | None = None

    @override
    @property
    def island(self) -> Group:
        return self._island

    @override
    def is_on_this_node(self, rank: int) -> bool:
        return rank in self._world.node_ranks

    @override
    def require_same(self, value: str, what: str) -> None:
        self._world.require_same(value, what)

    @override
    def reserve(self, plan: Callable[[], int]) -> None:
        num_bytes = self._world.run_on_all(plan)
        if num_bytes:
            others = self._world.job.num_models
            beside = f" (beside those of {others} other models, which close() frees)" if others else ""
            self._world.require_shared_memory(num_bytes, f"the parameter and gradient windows{beside}")

    @override
    def open(self, close: Callable[[], None]) -> None:
        self._world.on_close(close)
        self._close = close
        self._world.job.num_models += 1
        # Each collective has its own communicator. A rank that skips a collective therefore waits in the next one until
        # the deadline, whose message names it, instead of receiving the numbers of another collective.
        with self._world.collective("duplicating the communicator"):
            self._gradients_comm, self._norm_comm, self._publish_comm = (self._world.comm.Dup() for _ in range(3))
        if self._wants_progress:
            self._progress = ProgressThread(self._world, self._world.progress.run_tasks)
        self.parameters_published()

    @override
    def gradients_complete(self, report: np.ndarray) -> np.ndarray:
        return self._allgather(self._gradients_comm, report, "synchronizing at gradients_complete")

    @override
    def norm(self, values: np.ndarray) -> np.ndarray:
        # Not an all-reduce, whose order of addition differs from rank to rank in some libraries.
        rows = self._allgather(self._norm_comm, values, "synchronizing at grad_norm")
        return np.stack([part.sum(axis=0) for part in np.split(rows, self.num_replicas)])

    @override
    def parameters_published(self) -> None:
        self.num_collectives += 1
        self._world.wait_collective(self._publish_comm.Ibarrier(), "synchronizing at parameters_published")

    @override
    def broadcast(self, tensor: torch.Tensor) -> None:
        self._world.broadcast(tensor)

    @override
    def set_status(self, what: str, microbatch: int = 0) -> None:
        self._world.set_status(what, microbatch)

    @override
    def free(self, storages: Sequence[ShardStorage]) -> None:
        with self._world.collective("freeing the windows"):
            if self._progress is not None:
                self._progress.close()
            for storage in reversed(storages):
                storage.free()
            for comm in (self._gradients_comm, self._norm_comm, self._publish_comm):
                comm.Free()
            if self._islands is not None:
                self._islands.close()
        self._progress = None
        self._world.job.num_models -= 1
        self._world.cancel_on_close(self._close)

    def _allgather(self, comm: MPI.Intracomm, values: np.ndarray, what: str) -> np.ndarray:
        self.num_collectives += 1
        values = np.ascontiguousarray(values, dtype=np.float64)
        gathered = np.empty((self._world.size, values.size))
        self._world.wait_collective(comm.Iallgather(values, gathered), what)
        return gathered


class SeparateIslandsGroup(WorldGroup):
    """Group of the ranks in this rank's island, of which each trains a model of its own.

    All ranks of the world take part in the collectives.
    """

    def __init__(self, world: World, islands: Islands, *, progress: bool = False) -> None:
        super().__init__(world, progress=progress)
        self.rank, self.size = islands.island.rank, islands.island.size
        self.replica, self.num_replicas = islands.index, islands.size
        self._islands = islands

    @override
    def is_on_this_node(self, rank: int) -> bool:
        assert self._islands is not None
        return rank in self._islands.island.node_ranks

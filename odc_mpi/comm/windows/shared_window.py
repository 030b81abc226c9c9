"""A window over memory that the ranks of a node share, and that ranks of other nodes read with one-sided operations."""

import torch
from mpi4py import MPI
from torch.multiprocessing.reductions import StorageWeakRef

from odc_mpi.comm.windows.rma import Memory, WindowFactory, free_window, open_epoch, read_shard
from odc_mpi.runtime.world import World


class SharedWindow:
    """A shard of `[numel]` on every rank that the ranks of its node see in place. Creating and freeing is collective.

    Args:
        world: The ranks.
        numel: Elements per rank, the same on each.
        dtype: Of the elements.

    Attributes:
        tensor: This rank's shard, zero at first.
        all_shards: All shards as one array, where all ranks are on one node; None where they are not, or where the library
            leaves gaps (MPICH and Open MPI do not).
    """

    def __init__(self, world: World, numel: int, dtype: torch.dtype) -> None:
        self._itemsize = dtype.itemsize
        num_bytes = numel * dtype.itemsize
        with world.collective("allocating a shared window"):
            self._shared = MPI.Win.Allocate_shared(num_bytes, dtype.itemsize, MPI.INFO_NULL, world.node_comm)
            open_epoch(self._shared, world)
        shards = [self._shared.Shared_query(local_rank)[0] for local_rank in range(world.local_size)]
        self._mapped_shards = {
            rank: torch.frombuffer(shard, dtype=dtype, count=numel)
            for rank, shard in zip(world.node_ranks, shards, strict=True)
        }
        self.tensor = self._mapped_shards[world.rank]
        self.tensor.zero_()
        self.all_shards = None
        contiguous = all(shard.address == shards[0].address + i * num_bytes for i, shard in enumerate(shards))
        if world.num_nodes == 1 and contiguous:
            memory = MPI.memory.fromaddress(shards[0].address, num_bytes * world.size)
            self.all_shards = torch.frombuffer(memory, dtype=dtype)
        self._remote_win: MPI.Win | None = None
        if world.num_nodes > 1:
            with world.collective("opening a shared window to other nodes"):
                self._remote_win = MPI.Win.Create(shards[world.local_rank], dtype.itemsize, MPI.INFO_NULL, world.comm)
                open_epoch(self._remote_win, world)
        self.sync()

    def mapped_shard(self, target: int) -> torch.Tensor | None:
        """Return the shard of a rank of this node; None for others."""
        return self._mapped_shards.get(target)

    def mapped_memory(self) -> list[torch.Tensor]:
        """Return the shards of this node, as one piece where they are one."""
        return [self.all_shards] if self.all_shards is not None else list(self._mapped_shards.values())

    def get(self, target: int, buffer: Memory, start: int = 0) -> None:
        """Start to read elements of the shard of a rank on another node, from `start` on, into bytes. One-sided."""
        assert self._remote_win is not None and target not in self._mapped_shards
        read_shard(self._remote_win, target, buffer, self._itemsize, start)

    def flush(self) -> None:
        """Complete everything that this rank started. One-sided."""
        if self._remote_win is not None:
            self._remote_win.Flush_all()

    def sync(self) -> None:
        """Make stores of this rank seen by others, and theirs by this rank, once all have met."""
        self._shared.Sync()
        if self._remote_win is not None:
            self._remote_win.Sync()

    def free(self) -> None:
        """End the epochs and free the memory; who still looks at it sees a copy. Collective."""
        seen = [
            StorageWeakRef(memory.untyped_storage())
            for memory in (*self._mapped_shards.values(), *self.mapped_memory())
        ]
        self.tensor, self.all_shards = torch.empty(0), None
        self._mapped_shards.clear()
        if self._remote_win is not None:
            free_window(self._remote_win)
        free_window(self._shared, seen)


SHARED_WINDOW = WindowFactory(SharedWindow, shared=True)

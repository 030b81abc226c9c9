"""MPI window whose memory is shared by the ranks of a node. Ranks of other nodes read it with MPI_Get."""

import torch
from mpi4py import MPI
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from odc_mpi.comm.windows.rma import Memory, ReadableWindow, WindowFactory, free_window, open_epoch, read_shard
from odc_mpi.runtime.world import World


class SharedWindow(ReadableWindow):
    """Window with one zero-filled shard, `[numel]`, per rank. Ranks of the same node map each other's shards.

    Construction is collective. `numel` must be the same on all ranks. `all_shards` is None if there are several nodes,
    or if the library leaves gaps between the shards, which MPICH and Open MPI do not.
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

    @override
    def mapped_shard(self, target: int) -> torch.Tensor | None:
        return self._mapped_shards.get(target)

    @override
    def mapped_memory(self) -> list[torch.Tensor]:
        return [self.all_shards] if self.all_shards is not None else list(self._mapped_shards.values())

    @override
    def get(self, target: int, buffer: Memory, start: int = 0) -> None:
        assert self._remote_win is not None and target not in self._mapped_shards
        read_shard(self._remote_win, target, buffer, self._itemsize, start)

    @override
    def flush(self) -> None:
        if self._remote_win is not None:
            self._remote_win.Flush_all()

    @override
    def sync(self) -> None:
        self._shared.Sync()
        if self._remote_win is not None:
            self._remote_win.Sync()

    @override
    def free(self) -> None:
        tensors = (*self._mapped_shards.values(), *self.mapped_memory())
        storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self.tensor, self.all_shards = torch.empty(0), None
        self._mapped_shards.clear()
        if self._remote_win is not None:
            free_window(self._remote_win)
        free_window(self._shared, storages)


SHARED_WINDOW = WindowFactory(SharedWindow, shared=True)

"""MPI window whose memory is shared by the ranks of a node. Ranks of other nodes read it with MPI_Get."""

import torch
from mpi4py import MPI
from typing_extensions import override

from odc_mpi.comm.windows.rma import Window, WindowFactory
from odc_mpi.runtime.world import World


class SharedWindow(Window):
    """Window with one zero-filled shard, `[numel]`, per rank. Ranks of the same node map each other's shards.

    Construction is collective. `numel` must be the same on all ranks. `all_shards` is None if there are several nodes,
    or if the library leaves gaps between the shards, which MPICH and Open MPI do not.
    """

    @override
    def _make(
        self, world: World, numel: int, dtype: torch.dtype, info: MPI.Info
    ) -> tuple[list[MPI.Win], dict[int, torch.Tensor]]:
        num_bytes = numel * dtype.itemsize
        wins = [MPI.Win.Allocate_shared(num_bytes, dtype.itemsize, MPI.INFO_NULL, world.node_comm)]
        shards = [wins[0].Shared_query(local_rank)[0] for local_rank in range(world.local_size)]
        if world.num_nodes > 1:
            wins.insert(0, MPI.Win.Create(shards[world.local_rank], dtype.itemsize, MPI.INFO_NULL, world.comm))
        elif all(shard.address == shards[0].address + i * num_bytes for i, shard in enumerate(shards)):
            memory = MPI.memory.fromaddress(shards[0].address, num_bytes * world.size)
            self.all_shards = torch.frombuffer(memory, dtype=dtype)
        tensors = [torch.frombuffer(shard, dtype=dtype, count=numel) for shard in shards]
        return wins, dict(zip(world.node_ranks, tensors, strict=True))


SHARED_WINDOW = WindowFactory(SharedWindow, shared=True)

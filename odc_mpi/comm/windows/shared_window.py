"""MPI window whose memory is shared by the ranks on a node. Ranks on other nodes read it with MPI_Get."""

import torch
from mpi4py import MPI
from typing_extensions import override

from odc_mpi.comm.windows.rma import Window, WindowFactory
from odc_mpi.runtime.world import World


class SharedWindow(Window):
    """Window whose zero-filled shards, `[numel]` per rank, are mapped by all ranks on the same node.

    Construction is collective. `numel` must be the same on all ranks. The shards on a node are contiguous in memory, in
    the order of the ranks (MPI-4.1, 12.2.3).
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
        self._node_memory = MPI.memory.fromaddress(shards[0].address, num_bytes * world.local_size)
        tensors = [torch.frombuffer(shard, dtype=dtype, count=numel) for shard in shards]
        return wins, dict(zip(world.node_ranks, tensors, strict=True))

    @property
    @override
    def mapped_memory(self) -> torch.Tensor:
        return torch.frombuffer(self._node_memory, dtype=torch.uint8)

    def node_view(self, start: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return a view of the memory of all shards on the node, `[numel]` of `dtype`, beginning at byte `start`.

        Each view has its own storage. If `CAN_DETACH_STORAGE` is True, a view that is still referenced when the window
        is freed keeps a copy of its elements.
        """
        view = torch.frombuffer(self._node_memory, dtype=dtype, count=numel, offset=start)
        self._views.append(view)
        return view


SHARED_WINDOW = WindowFactory(SharedWindow)

"""Parameter store whose frozen arrays are sharded over the ranks of each node instead of all ranks.

Frozen arrays, whose layouts have `node_ranks`, never change, so nodes need not synchronize their copies. They are read
in shared memory without a copy, and never fetched over the network.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from typing_extensions import override

from odc_mpi.comm.buffers import storage_address
from odc_mpi.comm.layout import ALIGNMENT_NUMEL, FlatLayout
from odc_mpi.comm.transport import ParameterStore, ShardStorage
from odc_mpi.comm.windows.parameters import WindowParameters
from odc_mpi.comm.windows.rma import SharedWindow
from odc_mpi.comm.work import Work
from odc_mpi.runtime.world import World


class NodeScope(ShardStorage, ParameterStore):
    """Parameter store with frozen arrays in memory shared by the ranks of this node, and others in the store `inner`.

    Args:
        world: Ranks that shard the other arrays.
        inner: Store of the other arrays.
        storages: Storages of `inner`, of which the first counts the bytes moved. This store allocates and frees them.
    """

    def __init__(self, world: World, inner: ParameterStore, storages: Sequence[ShardStorage]) -> None:
        super().__init__(inner.dtype, inner.buffers)
        self._world, self._inner, self._storages = world, inner, list(storages)
        self.traffic = storages[0].traffic

    @override
    def plan(self, layouts: Sequence[FlatLayout]) -> int:
        super().plan(layouts)
        self._node = self._world.split("node")
        self._frozen = WindowParameters(self._node, self.dtype, SharedWindow)
        # Arrays keep their indices: in the other store they are empty.
        others = [_emptied(layout) if layout.node_ranks else layout for layout in layouts]
        frozen = [layout if layout.node_ranks else _emptied(layout) for layout in layouts]
        return sum(storage.plan(others) for storage in self._storages) + self._frozen.plan(frozen)

    @override
    def allocate(self) -> None:
        for storage in (*self._storages, self._frozen):
            storage.allocate()
        self.transfers, self.stays_valid = self._inner.transfers, self._inner.stays_valid and self._frozen.stays_valid
        indices = (index for index, layout in enumerate(self.layouts) if layout.node_ranks)
        self._addresses = {storage_address(self._frozen.acquire_buffer(index)) for index in indices}

    @override
    def publish(self) -> None:
        for storage in self._storages:
            storage.publish()

    @override
    def sync(self) -> None:
        for storage in (*self._storages, self._frozen):
            storage.sync()

    @override
    def mapped_memory(self) -> list[torch.Tensor]:
        return [memory for storage in (*self._storages, self._frozen) for memory in storage.mapped_memory()]

    @override
    def free(self) -> None:
        for storage in (self._frozen, *reversed(self._storages)):
            storage.free()
        self._node.close()

    @override
    def uses_buffer(self, index: int) -> bool:
        return self._store(index).uses_buffer(index)

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._store(index).shard(index)

    @override
    def acquire_buffer(self, index: int) -> torch.Tensor:
        return self._store(index).acquire_buffer(index)

    @override
    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        return self._store(index).start_fetch(index, buffer)

    @override
    def release(self, fetched: torch.Tensor) -> None:
        if storage_address(fetched) not in self._addresses:
            self._inner.release(fetched)

    def _store(self, index: int) -> ParameterStore:
        return self._frozen if self.layouts[index].node_ranks else self._inner


def _emptied(layout: FlatLayout) -> FlatLayout:
    # Of one block, because a view of memory cannot be empty.
    return replace(layout, ranges=(), numel=ALIGNMENT_NUMEL, shard_numel=ALIGNMENT_NUMEL)

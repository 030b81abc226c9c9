"""Parameters in MPI windows. Each array has its own window, so a flush waits for the fetch of one array only.

A fetch returns a view if this rank maps the shards of all ranks contiguously. Otherwise it copies the shards that this
rank maps, issues an MPI_Get for each other shard, and flushes the window.
`comm.device.device_stores` fetches arrays to a device.
"""

from collections.abc import Sequence

import torch
from typing_extensions import override

from odc_mpi.comm.buffers import BufferPool, copy_host
from odc_mpi.comm.layout import FlatLayout
from odc_mpi.comm.shard_storage import Footprint, ShardStorage, ranges_by_owner
from odc_mpi.comm.transport import Access, ParameterStore
from odc_mpi.comm.windows.rma import CAN_DETACH_STORAGE, Window, WindowFactory, deferred_flush
from odc_mpi.comm.work import FetchWork, Work
from odc_mpi.runtime.world import World


class WindowParameters(ShardStorage, ParameterStore):
    """Parameters in windows of `kind`, one per array. Fetches go to host memory.

    They do not copy if this rank maps all shards contiguously.
    """

    def __init__(
        self, world: World, dtype: torch.dtype, kind: WindowFactory, buffers: BufferPool | None = None
    ) -> None:
        super().__init__(dtype, buffers)
        self.world = world
        self._kind = kind
        self._windows: list[Window] = []

    @override
    def plan(self, layouts: Sequence[FlatLayout]) -> Footprint:
        super().plan(layouts)
        per_array = 2 if self._kind.shared and self.world.num_nodes > 1 else 1
        return Footprint(len(layouts) * per_array, self.shard_bytes if self._kind.on_host else 0)

    @override
    def allocate(self) -> None:
        for index, layout in enumerate(self.layouts):
            self._windows.append(self._kind.create(self.world, layout.shard_numel, self.dtype_of(index)))
        if all(window.all_shards is not None for window in self._windows):
            self.access = Access.KEEP if CAN_DETACH_STORAGE else Access.VIEW

    def owned_ranges(self, index: int) -> dict[int, tuple[int, int]]:
        """Map each owner of a part of an array to the range of elements, start and stop, that it owns."""
        layout = self.layouts[index]
        ranges = ranges_by_owner(layout, self.world.rank, 0, layout.numel)
        return {owner: (start, stop) for owner, start, stop in ranges}

    def start_gets(self, index: int, owners: Sequence[int], buffer: torch.Tensor) -> Work:
        """Start to read the shards of `owners` into their ranges of `buffer`, the full array. One-sided."""
        layout, window = self.layouts[index], self._windows[index]
        memory = self._kind.as_buffer(buffer.view(torch.uint8))
        what = f"fetching unit {layout.name}"
        with self.world.deadline(what, owners):
            for owner in owners:
                start, stop = layout.owned(owner)
                window.get(owner, memory[start * buffer.itemsize : stop * buffer.itemsize])
        return deferred_flush(self.world, window.flush, what, owners, buffer)

    @override
    def sync(self) -> None:
        for window in self._windows:
            window.sync()

    @override
    def mapped_memory(self) -> list[torch.Tensor]:
        return [memory for window in self._windows for memory in window.mapped_memory()]

    @override
    def free(self) -> None:
        while self._windows:
            self._windows.pop().free()

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._windows[index].tensor

    @override
    def fetch(self, index: int) -> FetchWork:
        if self.access is Access.COPY:
            return super().fetch(index)
        self.world.progress.run_tasks()
        shards = self._windows[index].all_shards
        assert shards is not None
        return FetchWork(shards[: self.layouts[index].numel], Work())

    @override
    def release(self, fetched: torch.Tensor) -> None:
        if self.access is Access.COPY:
            super().release(fetched)

    @override
    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        self.world.progress.run_tasks()
        ranges, window = self.owned_ranges(index), self._windows[index]
        mapped = {owner: shard for owner in ranges if (shard := window.mapped_shard(owner)) is not None}
        work = self.start_gets(index, [owner for owner in ranges if owner not in mapped], buffer)
        # While the Gets are in flight:
        for owner, shard in mapped.items():
            start, stop = ranges[owner]
            copy_host(buffer[start:stop], shard[: stop - start])
        return work

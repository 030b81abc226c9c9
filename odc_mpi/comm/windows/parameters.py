"""Parameters in MPI windows. Each array has its own window, so a flush waits for the fetch of one array only.

A fetch returns a view if this rank maps the shards of all ranks contiguously. Otherwise it copies the shards that this
rank maps, issues an MPI_Get for each other shard, and flushes the window.

`ParameterWindows` owns the shards, on the host or on a device. `WindowParameters` fetches arrays from them to the host.
`comm.device.device_stores` fetches arrays to a device.
"""

from collections.abc import Sequence

import torch
from typing_extensions import override

from odc_mpi.comm.buffers import BufferPool
from odc_mpi.comm.shard_storage import Footprint, Layout, ShardStorage, ranges_by_owner
from odc_mpi.comm.transport import Access, ParameterStore
from odc_mpi.comm.windows.rma import CAN_DETACH_STORAGE, ReadableWindow, WindowFactory, deferred_flush
from odc_mpi.comm.work import CompletedWork, FetchWork, Work
from odc_mpi.runtime.world import World


class ParameterWindows(ShardStorage):
    """Storage of parameter shards, with one window per array.

    Attributes:
        dtype: Default dtype of the shards. The `dtype` of a layout takes precedence.
        all_shards_mapped: True if, in every window, this rank maps the shards of all ranks contiguously.
    """

    def __init__(self, world: World, dtype: torch.dtype, kind: WindowFactory) -> None:
        self.dtype = dtype
        self.world = world
        self._kind = kind
        self._windows: list[ReadableWindow] = []
        self.all_shards_mapped = False

    def __getitem__(self, index: int) -> ReadableWindow:
        return self._windows[index]

    @override
    def plan(self, layouts: Sequence[Layout]) -> Footprint:
        super().plan(layouts)
        num_bytes = sum(layout.shard_numel * (layout.dtype or self.dtype).itemsize for layout in layouts)
        per_array = 2 if self._kind.shared and self.world.num_nodes > 1 else 1
        return Footprint(len(layouts) * per_array, num_bytes if self._kind.on_host else 0)

    @override
    def allocate(self) -> None:
        for layout in self.layouts:
            self._windows.append(self._kind.create(self.world, layout.shard_numel, layout.dtype or self.dtype))
        self.all_shards_mapped = all(window.all_shards is not None for window in self._windows)

    def owned_ranges(self, index: int) -> dict[int, tuple[int, int]]:
        """Map each owner of a part of an array to the range of elements, start and stop, that it owns."""
        layout = self.layouts[index]
        ranges = ranges_by_owner(layout, self.world.rank, 0, layout.numel)
        return {owner: (start, stop) for owner, start, stop in ranges}

    def start_gets(self, index: int, owners: Sequence[int], buffer: torch.Tensor) -> Work:
        """Start to read the shards of `owners` into their ranges of `buffer`, the full array. One-sided."""
        layout, window, memory = (
            self.layouts[index],
            self._windows[index],
            self._kind.as_buffer(buffer.view(torch.uint8)),
        )
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


class WindowParameters(ParameterStore):
    """Parameters in windows in host memory. Fetches do not copy if this rank maps all shards."""

    def __init__(self, windows: ParameterWindows, buffers: BufferPool | None = None) -> None:
        super().__init__(windows.dtype, buffers)
        self._windows = windows

    @property
    def access(self) -> Access:  # type: ignore[override]
        """Kind of access: COPY, or VIEW or KEEP if this rank maps all shards (KEEP if `CAN_DETACH_STORAGE`)."""
        if not self._windows.all_shards_mapped:
            return Access.COPY
        return Access.KEEP if CAN_DETACH_STORAGE else Access.VIEW

    @override
    @property
    def layouts(self) -> Sequence[Layout]:
        return self._windows.layouts

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._windows[index].tensor

    @override
    def fetch(self, index: int) -> FetchWork:
        if self.access is Access.COPY:
            return super().fetch(index)
        self._windows.world.progress.run_tasks()
        shards = self._windows[index].all_shards
        assert shards is not None
        return FetchWork(shards[: self.layouts[index].numel], CompletedWork())

    @override
    def release(self, fetched: torch.Tensor) -> None:
        if self.access is Access.COPY:
            super().release(fetched)

    @override
    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        self._windows.world.progress.run_tasks()
        ranges, window = self._windows.owned_ranges(index), self._windows[index]
        mapped = {owner: shard for owner in ranges if (shard := window.mapped_shard(owner)) is not None}
        work = self._windows.start_gets(index, [owner for owner in ranges if owner not in mapped], buffer)
        # While the Gets are in flight:
        for owner, shard in mapped.items():
            start, stop = ranges[owner]
            buffer[start:stop].copy_(shard[: stop - start])
        return work

"""Parameters in MPI windows: one window per array, so that a flush concerns that array alone.

    fetch             where all ranks are on one node: a view, nothing moves; else copies from the node's ranks, and a
                      Get from each other owner, then a flush
    B                 Sync: what owners wrote is in the windows; then all meet (a barrier), then Sync

`ParameterWindows` hosts the shards, on the host or on a device; `WindowParameters` fetches them to the host, and
`comm.device.device_stores` to a device. The owner takes no part.
"""

from collections.abc import Sequence

import torch
from typing_extensions import override

from odc_mpi.comm.shard_storage import Footprint, Layout, ShardStorage, ranges_by_owner
from odc_mpi.comm.transport import Access, ParameterStore
from odc_mpi.comm.windows.rma import CAN_DETACH_STORAGE, ReadableWindow, WindowFactory, deferred_flush
from odc_mpi.comm.work import CompletedWork, FetchWork, Work
from odc_mpi.runtime.world import World


class ParameterWindows(ShardStorage):
    """A window for this rank's shard of each array. Making one is local.

    Args:
        world: The ranks that share every array.
        dtype: Of the shards, unless a layout has a type of its own.
        kind: Of the windows.

    Attributes:
        all_shards_mapped: Whether this rank sees the shards of all ranks in place, one after the other, in every window.
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
            self._windows.append(self._kind.make(self.world, layout.shard_numel, layout.dtype or self.dtype))
        self.all_shards_mapped = all(window.all_shards is not None for window in self._windows)

    def owned_ranges(self, index: int) -> dict[int, tuple[int, int]]:
        """Return the owners that have elements of an array, and the first and the end of each one's part."""
        layout = self.layouts[index]
        return {
            owner: (start, stop) for owner, start, stop in ranges_by_owner(layout, self.world.rank, 0, layout.numel)
        }

    def start_gets(self, index: int, owners: Sequence[int], buffer: torch.Tensor) -> Work:
        """Start to read the parts of these owners into a buffer for the whole array. One-sided."""
        layout, window, memory = self.layouts[index], self._windows[index], self._kind.memory(buffer.view(torch.uint8))
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
    """Parameters from windows on host memory, in place where all windows are seen in one piece.

    Args:
        windows: Host the shards.
    """

    def __init__(self, windows: ParameterWindows) -> None:
        super().__init__(windows.dtype)
        self._windows = windows

    @property
    def access(self) -> Access:  # type: ignore[override]
        """By copies, unless all arrays are seen in one piece."""
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
        whole = self._windows[index].all_shards
        assert whole is not None
        return FetchWork(whole[: self.layouts[index].numel], CompletedWork())

    @override
    def release(self, fetched: torch.Tensor) -> None:
        if self.access is Access.COPY:
            super().release(fetched)

    @override
    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        self._windows.world.progress.run_tasks()
        parts, window = self._windows.owned_ranges(index), self._windows[index]
        near = {owner: shard for owner in parts if (shard := window.mapped_shard(owner)) is not None}
        pending = self._windows.start_gets(index, [owner for owner in parts if owner not in near], buffer)
        # While those are on their way:
        for owner, shard in near.items():
            start, stop = parts[owner]
            buffer[start:stop].copy_(shard[: stop - start])
        return pending

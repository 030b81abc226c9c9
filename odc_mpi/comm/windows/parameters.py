"""Parameters in MPI windows. Each array has its own window, so a flush waits for the fetch of one array only.

A fetch returns a view if this rank maps the shards of all ranks contiguously. Otherwise it copies the shards that this
rank maps, issues an MPI_Get for each other shard, and flushes the window. These steps are the same for fetches of an
array, and are determined once (`FetchPlan`). `comm.device.device_stores` fetches arrays to a device.
"""

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
from typing_extensions import override

from odc_mpi.comm.buffers import BufferPool, copy_host
from odc_mpi.comm.layout import FlatLayout
from odc_mpi.comm.shard_storage import Footprint, ShardStorage, ranges_by_owner
from odc_mpi.comm.transport import Access, ParameterStore
from odc_mpi.comm.windows.rma import CAN_DETACH_STORAGE, Message, Window, WindowFactory, deferred_flush, messages
from odc_mpi.comm.work import FetchWork, Work
from odc_mpi.runtime.world import World


class FetchPlan(NamedTuple):
    """Steps of a fetch, shared by arrays of equal size.

    Attributes:
        owners: Ranks that are accessed with MPI_Get.
        gets: Messages of these Gets.
        mapped: Owner, start and stop in the array (elements) of each shard that this rank maps.
    """

    owners: tuple[int, ...]
    gets: tuple[Message, ...]
    mapped: tuple[tuple[int, int, int], ...]


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
        self._plan_of = cache(self._plan_fetch)

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

    def fetch_plan(self, index: int) -> FetchPlan:
        """Return the steps of a fetch of an array."""
        return self._plan_of(self.layouts[index].numel, self.layouts[index].shard_numel)

    def start_gets(self, index: int, buffer: torch.Tensor) -> Work:
        """Start to read the shards that this rank does not map into `buffer`, the full array. One-sided."""
        owners, gets, _ = self.fetch_plan(index)
        window, what = self._windows[index], f"fetching unit {self.layouts[index].name}"
        with self.world.deadline(what, owners):
            window.get_messages(self._kind.as_buffer(buffer.view(torch.uint8)), gets)
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
        window, work = self._windows[index], self.start_gets(index, buffer)
        # While the Gets are in flight:
        for owner, start, stop in self.fetch_plan(index).mapped:
            shard = window.mapped_shard(owner)
            assert shard is not None
            copy_host(buffer[start:stop], shard[: stop - start])
        return work

    def _plan_fetch(self, numel: int, shard_numel: int) -> FetchPlan:
        mapped_ranks = self.world.node_ranks if self._kind.shared else (self.world.rank,)
        ranges = tuple(ranges_by_owner(shard_numel, self.world.rank, 0, numel))
        others = [part for part in ranges if part[0] not in mapped_ranks]
        gets = chain.from_iterable(messages(owner, 0, stop - start, start) for owner, start, stop in others)
        mapped = tuple(part for part in ranges if part[0] in mapped_ranks)
        return FetchPlan(tuple(owner for owner, _, _ in others), tuple(gets), mapped)

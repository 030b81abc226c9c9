"""Parameter store with the shards of all arrays in one MPI window.

With a `SharedWindow` on one node, the node's memory holds full arrays contiguously, and a fetch returns a view.
Otherwise, each rank's memory holds its shards contiguously. A fetch then starts an MPI_Get for each shard that
this rank does not map, copies the mapped shards in the meantime, and flushes the window. Arrays of equal size share the
steps of a fetch (`FetchPlan`). A flush completes all fetches in flight, of which there is usually one, since a single
thread prefetches (`shard.prefetch`).
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from typing_extensions import override

from odc_mpi.comm.buffers import copy_host
from odc_mpi.comm.layout import FlatLayout, ranges_by_owner
from odc_mpi.comm.traffic import FETCHED, Traffic
from odc_mpi.comm.transport import ParameterStore, ShardStorage
from odc_mpi.comm.windows.rma import (
    CAN_DETACH_STORAGE,
    Message,
    SharedWindow,
    Window,
    as_mpi_buffer,
    deferred_flush,
    messages,
)
from odc_mpi.comm.work import Work
from odc_mpi.runtime.world import World


class FetchPlan(NamedTuple):
    """Steps of a fetch, shared by arrays of equal size. Sizes and offsets are in bytes.

    Attributes:
        owners: Ranks from which this rank fetches with MPI_Get.
        gets: Parts to fetch with MPI_Get. Window offsets are relative to the start of the array's shard, and buffer
            offsets to the start of the array.
        mapped: `(owner, start, stop)` for each shard that this rank maps. `start` and `stop` are offsets in the array.
        unmapped: `(start, stop)` for each range of the array that consists of shards that this rank does not map.
    """

    owners: tuple[int, ...]
    gets: tuple[Message, ...]
    mapped: tuple[tuple[int, int, int], ...]
    unmapped: tuple[tuple[int, int], ...]


class WindowParameters(ShardStorage, ParameterStore):
    """Parameter store with its shards in an MPI window. `kind` creates the window and takes the arguments of `Window`.

    A fetch returns a view if the window is a `SharedWindow` and all ranks are on one node, and a copy otherwise.
    """

    def __init__(self, world: World, dtype: torch.dtype, kind: Callable[..., Window] = SharedWindow) -> None:
        super().__init__(dtype)
        self.world = world
        self._kind, self.traffic = kind, Traffic(FETCHED, world.rank, world.node_ranks)
        self._shards: list[torch.Tensor] = []
        # Full arrays, if fetches do not copy. To torch, they share no storage with `_shards`, because autograd must not
        # mistake a change of a shard for a change of a saved tensor.
        self._arrays: list[torch.Tensor] = []
        self._plan_of = cache(self._plan_fetch)

    @override
    def plan(self, layouts: Sequence[FlatLayout]) -> int:
        super().plan(layouts)
        sizes = (layout.shard_numel * self.dtype_of(index).itemsize for index, layout in enumerate(layouts))
        *self._starts, num_bytes = accumulate(sizes, initial=0)
        return num_bytes

    @override
    def allocate(self) -> None:
        self._window = self._kind(self.world, self.shard_bytes, torch.uint8)
        arrays = [(start, self.dtype_of(i), self.layouts[i].shard_numel) for i, start in enumerate(self._starts)]
        if isinstance(self._window, SharedWindow) and self.world.num_nodes == 1:
            # In the node's memory, the shards of an array are contiguous.
            self.transfers, self.stays_valid = False, CAN_DETACH_STORAGE
            rank, size, view = self.world.rank, self.world.size, self._window.node_view
            self._arrays = [view(size * start, dtype, size * numel) for start, dtype, numel in arrays]
            self._shards = [
                view(size * start + rank * numel * dtype.itemsize, dtype, numel) for start, dtype, numel in arrays
            ]
        else:
            self._shards = [self._window.tensor[start:].view(dtype)[:numel] for start, dtype, numel in arrays]

    @property
    def maps_all_shards(self) -> bool:
        """True if this rank maps the shards of all ranks, so that fetches need no MPI_Get. Valid after allocation."""
        return all(self._window.mapped_shard(rank) is not None for rank in range(self.world.size))

    def fetch_plan(self, index: int) -> FetchPlan:
        """Return the steps for fetching array `index`."""
        layout, itemsize = self.layouts[index], self.dtype_of(index).itemsize
        return self._plan_of(layout.numel * itemsize, layout.shard_numel * itemsize)

    def start_gets(self, index: int, buffer: torch.Tensor) -> Work:
        """Start fetching the unmapped shards of array `index` into `buffer`, which has the array's size. One-sided."""
        owners, gets, *_ = self.fetch_plan(index)
        window, what = self._window, f"fetching unit {self.layouts[index].name}"
        with self.world.deadline(what, owners):
            window.get_messages(as_mpi_buffer(buffer.view(torch.uint8)), gets, self._starts[index])
        return deferred_flush(self.world, window.flush, what, owners, buffer)

    def mapped_bytes(self, index: int, owner: int) -> torch.Tensor:
        """Return rank `owner`'s mapped memory as uint8, starting at its shard of array `index`."""
        memory = self._window.mapped_shard(owner)
        assert memory is not None
        return memory[self._starts[index] :]

    @override
    def sync(self) -> None:
        self._window.sync()

    @override
    def mapped_memory(self) -> list[torch.Tensor]:
        return [self._window.mapped_memory]

    @override
    def free(self) -> None:
        self._shards, self._arrays = [], []
        self._window.free()

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._shards[index]

    @override
    def acquire_buffer(self, index: int) -> torch.Tensor:
        return super().acquire_buffer(index) if self.transfers else self._arrays[index][: self.layouts[index].numel]

    @override
    def release(self, fetched: torch.Tensor) -> None:
        if self.transfers:
            super().release(fetched)

    @override
    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        self.world.progress.run_tasks()
        if not self.transfers:
            return Work()
        self.traffic.add(self.layouts[index], self.dtype_of(index).itemsize)
        work = self.start_gets(index, buffer)
        # While the Gets are in flight, copy the mapped shards.
        data = buffer.view(torch.uint8)
        for owner, start, stop in self.fetch_plan(index).mapped:
            copy_host(data[start:stop], self.mapped_bytes(index, owner)[: stop - start])
        return work

    def _plan_fetch(self, num_bytes: int, shard_bytes: int) -> FetchPlan:
        ranges = tuple(ranges_by_owner(shard_bytes, self.world.rank, 0, num_bytes))
        others = [part for part in ranges if self._window.mapped_shard(part[0]) is None]
        gets = chain.from_iterable(messages(owner, 0, stop - start, start) for owner, start, stop in others)
        mapped = tuple(part for part in ranges if self._window.mapped_shard(part[0]) is not None)
        unmapped: list[tuple[int, int]] = []
        for _, start, stop in sorted(others):
            follows = bool(unmapped) and unmapped[-1][1] == start
            unmapped.append((unmapped.pop()[0] if follows else start, stop))
        return FetchPlan(tuple(owner for owner, _, _ in others), tuple(gets), mapped, tuple(unmapped))

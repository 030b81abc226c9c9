"""Gradient stores over windows: the base class, and the store that uses MPI_Accumulate.

    push       start to add a gradient to the shards of its owners, during a minibatch. One-sided
    flush      complete all pushes of this rank at their targets, before ranks synchronize. One-sided
    complete   make the sums available in the shards, after all ranks have flushed and synchronized

With the store in `comm.reduce.mailbox`, the owners add the gradients.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain

import torch
from typing_extensions import override

from odc_mpi.comm.layout import FlatLayout
from odc_mpi.comm.shard_storage import Footprint, ShardStorage, ranges_by_owner
from odc_mpi.comm.transport import GradientStore
from odc_mpi.comm.windows.rma import HOST_WINDOW, Message, Window, WindowFactory, deferred_flush, messages
from odc_mpi.comm.work import Work
from odc_mpi.runtime.library import is_mpich
from odc_mpi.runtime.world import World

#: Maximum number of windows per array, and of ranks of a node that add to it concurrently. More were not measured.
MAX_WINDOWS_PER_ARRAY = 4
#: Maximum number of windows of all arrays together, unless there are more arrays than this. A library may limit the
#: number of windows (`comm.group`), and parameters also need windows.
MAX_WINDOWS = 800
#: Maximum number of plans that a store keeps. Few different ranges are pushed, but a plan for 1000 owners takes 0.3 MB.
MAX_PLANS = 256


class WindowGradientStore(GradientStore, ShardStorage):
    """Base class of gradient stores that transfer gradients through MPI windows."""

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.world = world

    @override
    def mapped_memory(self) -> list[torch.Tensor]:
        return [self.shard(index) for index in self.trainable_numels]


class AccumulateGradientStore(WindowGradientStore):
    """Gradient store that pushes with MPI_Accumulate(MPI_SUM) into windows of the owners, which take no part.

    MPICH serializes all MPI_Accumulate operations on a window within a node, even to different owners. With MPICH an
    array therefore has several windows, and each rank has its shard in one of them. Two ranks that push 16 MB
    concurrently then take half the time.
    """

    def __init__(self, world: World, dtype: torch.dtype, kind: WindowFactory = HOST_WINDOW) -> None:
        super().__init__(world, dtype)
        self._kind = kind
        self._per_array = 1
        self._windows: dict[int, list[Window]] = {}
        self._plan_of = lru_cache(MAX_PLANS)(self._plan_push)

    @override
    def plan(self, layouts: Sequence[FlatLayout]) -> Footprint:
        super().plan(layouts)
        self._per_array = windows_per_array(self.world.mpi_library, self.world.size, len(self.trainable_numels))
        num_bytes = sum(self.trainable_numels.values()) * self.dtype.itemsize
        return Footprint(len(self.trainable_numels) * self._per_array, num_bytes if self._kind.on_host else 0)

    @override
    def allocate(self) -> None:
        self._windows = {index: self._allocate_windows(numel) for index, numel in self.trainable_numels.items()}

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._windows[index][self._window_of(self.world.rank)].tensor

    @override
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        assert gradient.dtype == self.dtype
        layout, values = self.layouts[index], self._kind.as_buffer(gradient)
        what = f"accumulating the gradient of unit {layout.name}"
        owners, by_window = self._plan_of(layout.shard_numel, start, start + gradient.numel())
        with self.world.deadline(what, owners):
            for number, parts in by_window.items():
                self._windows[index][number].accumulate_messages(values, parts)
        # Local completion: the buffer may be reused. `flush` completes the operation at the targets.
        return deferred_flush(self.world, lambda: self._flush_local(index), what, owners, gradient)

    @override
    def flush(self) -> None:
        with self.world.deadline("flushing gradients"):
            for window in self._all_windows():
                window.flush()

    @override
    def complete(self) -> None:
        self.sync()

    @override
    def sync(self) -> None:
        for window in self._all_windows():
            window.sync()

    @override
    def free(self) -> None:
        for window in reversed(list(self._all_windows())):
            window.free()
        self._windows = {}

    def _allocate_windows(self, numel: int) -> list[Window]:
        own = self._window_of(self.world.rank)
        numels = [numel if i == own else 0 for i in range(self._per_array)]
        return [self._kind.create(self.world, n, self.dtype, same_size=self._per_array == 1) for n in numels]

    def _plan_push(self, shard_numel: int, start: int, stop: int) -> tuple[tuple[int, ...], dict[int, list[Message]]]:
        """Return the owners of a range of elements, and the messages to them by number of the window."""
        by_window: dict[int, list[Message]] = {}
        ranges = tuple(ranges_by_owner(shard_numel, self.world.rank, start, stop))
        for owner, begin, end in ranges:
            parts = messages(owner, begin - owner * shard_numel, end - begin, begin - start)
            by_window.setdefault(self._window_of(owner), []).extend(parts)
        return tuple(owner for owner, _, _ in ranges), by_window

    def _window_of(self, owner: int) -> int:
        return owner % self._per_array

    def _all_windows(self) -> Iterator[Window]:
        return chain.from_iterable(self._windows.values())

    def _flush_local(self, index: int) -> None:
        for window in self._windows[index]:
            window.flush_local()


def windows_per_array(library: str, num_ranks: int, num_arrays: int) -> int:
    """Return the number of windows per array that allows concurrent accumulates to different owners.

    Args:
        library: Name and version of the MPI library, as in `World.mpi_library`. The MPICH family needs several.
        num_arrays: Number of trainable arrays.
    """
    if not is_mpich(library):
        return 1  # Open MPI has one lock per target
    return max(1, min(num_ranks, MAX_WINDOWS_PER_ARRAY, MAX_WINDOWS // max(1, num_arrays)))

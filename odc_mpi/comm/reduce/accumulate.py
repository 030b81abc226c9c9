"""Gradient stores over windows: the base class, and the store that uses MPI_Accumulate.

    push       during a minibatch: start to add a gradient to the shards of its owners. One-sided
    flush      before the gradients are complete: all pushes of this rank have completed at their targets. One-sided
    complete   after the gradients are complete on all ranks: the shards contain the sums

In `comm.reduce.mailbox` the owners add.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from typing_extensions import override

from odc_mpi.comm.shard_storage import Footprint, Layout, ShardStorage, ranges_by_owner
from odc_mpi.comm.transport import GradientStore
from odc_mpi.comm.windows.rma import HOST_WINDOW, Window, WindowFactory, deferred_flush
from odc_mpi.comm.work import Work
from odc_mpi.runtime.world import World

#: Maximum number of ranks of a node that add to an array concurrently. Larger values were not measured.
MAX_WINDOWS_PER_ARRAY = 4
#: Maximum number of windows of all arrays together, unless there are more arrays: a library may limit the number of
#: windows (`comm.group`), and parameters need windows, too.
MAX_WINDOWS = 800


class WindowGradientStore(GradientStore, ShardStorage):
    """Base class of gradient stores that use windows."""

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.world = world

    @override
    def mapped_memory(self) -> list[torch.Tensor]:
        return [self.shard(index) for index in self.trainable_numels]

    def split_by_owner(self, index: int, start: int, stop: int) -> Iterator[tuple[int, int, slice]]:
        """Yield the owners of elements `start` to `stop`, the offset in each one's shard, and the part to add there."""
        layout = self.layouts[index]
        for owner, begin, end in ranges_by_owner(layout, self.world.rank, start, stop):
            yield owner, begin - layout.owned(owner)[0], slice(begin - start, end - start)


class AccumulateGradientStore(WindowGradientStore):
    """MPI_Accumulate(MPI_SUM) into the gradient windows of the owners, without action by the owners.

    MPICH serializes all MPI_Accumulate operations on a window within a node, also those to different owners. With MPICH
    an array therefore has several windows, and each rank has its shard in one of them: two ranks that push 16 MB
    concurrently then take half of the time.
    """

    def __init__(self, world: World, dtype: torch.dtype, kind: WindowFactory = HOST_WINDOW) -> None:
        super().__init__(world, dtype)
        self._kind = kind
        self._per_array = 1
        self._windows: dict[int, list[Window]] = {}

    @override
    def plan(self, layouts: Sequence[Layout]) -> Footprint:
        super().plan(layouts)
        self._per_array = windows_per_array(self.world.mpi_library, self.world.size, len(self.trainable_numels))
        num_bytes = sum(self.trainable_numels.values()) * self.dtype.itemsize
        return Footprint(len(self.trainable_numels) * self._per_array, num_bytes if self._kind.on_host else 0)

    @override
    def allocate(self) -> None:
        self._windows = {index: self._allocate_windows(numel) for index, numel in self.trainable_numels.items()}

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._window(index, self.world.rank).tensor

    @override
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        assert gradient.dtype == self.dtype
        layout, values, stop = self.layouts[index], self._kind.memory(gradient), start + gradient.numel()
        what = f"accumulating the gradient of unit {layout.name}"
        owners = layout.owners(start, stop)
        with self.world.deadline(what, owners):
            for owner, begin, part in self.split_by_owner(index, start, stop):
                self._window(index, owner).accumulate(owner, begin, values[part])
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
        own = self.world.rank % self._per_array
        numels = [numel if i == own else 0 for i in range(self._per_array)]
        return [self._kind.make(self.world, n, self.dtype, same_size=self._per_array == 1) for n in numels]

    def _window(self, index: int, owner: int) -> Window:
        return self._windows[index][owner % self._per_array]

    def _all_windows(self) -> Iterator[Window]:
        return chain.from_iterable(self._windows.values())

    def _flush_local(self, index: int) -> None:
        for window in self._windows[index]:
            window.flush_local()


def windows_per_array(library: str, num_ranks: int, num_arrays: int) -> int:
    """Return the number of windows per array, so that ranks can add concurrently with `World.mpi_library`."""
    if not library.startswith("MPICH"):
        return 1  # Open MPI has one lock per target
    return max(1, min(num_ranks, MAX_WINDOWS_PER_ARRAY, MAX_WINDOWS // max(1, num_arrays)))

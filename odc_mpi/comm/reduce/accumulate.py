"""Base class of gradient stores in MPI windows, and the store that uses MPI_Accumulate."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from typing_extensions import override

from odc_mpi.comm.layout import FlatLayout, ranges_by_owner
from odc_mpi.comm.traffic import PUSHED, Traffic
from odc_mpi.comm.transport import GradientStore, ShardStorage
from odc_mpi.comm.windows.rma import Message, Window, as_mpi_buffer, deferred_flush, messages
from odc_mpi.comm.work import Work
from odc_mpi.runtime.library import is_mpich
from odc_mpi.runtime.world import World

#: Maximum number of windows, and thus of ranks on a node that can add concurrently.
MAX_WINDOWS = 4
#: Maximum number of plans that a store caches. Few distinct ranges are pushed. A plan for 1000 owners takes 0.3 MB.
MAX_PLANS = 256


class WindowGradientStore(GradientStore, ShardStorage):
    """Base class for gradient stores that transfer gradients through MPI windows."""

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.world = world
        self.is_local = world.size == 1
        self.traffic = Traffic(PUSHED, world.rank, world.node_ranks)

    @override
    def mapped_memory(self) -> list[torch.Tensor]:
        return [self.shard(index) for index in self.trainable_numels]

    def add_received(self) -> None:
        """Make the gradients that have arrived available in the shards, even while others are still being pushed."""
        self.sync()


class AccumulateGradientStore(WindowGradientStore):
    """Gradient store that pushes into windows using MPI_Accumulate with MPI_SUM. The owners do not participate.

    `kind` creates the windows and takes the arguments of `Window`. If `on_host` is True, they are in host memory. A
    rank's shards of all trainable arrays are contiguous in one window. Within a node, MPICH serializes all
    MPI_Accumulate operations on a window, even those to different owners. With MPICH, the ranks are therefore spread
    across up to `MAX_WINDOWS` windows, which halves the time of two concurrent pushes of 16 MB.
    """

    def __init__(
        self, world: World, dtype: torch.dtype, kind: Callable[..., Window] = Window, *, on_host: bool = True
    ) -> None:
        super().__init__(world, dtype)
        self._kind, self._on_host = kind, on_host
        # Open MPI has one lock per target.
        self._num_windows = min(world.size, MAX_WINDOWS) if is_mpich(world.mpi_library) else 1
        self._windows: list[Window] = []
        self._plan_of = lru_cache(MAX_PLANS)(self._plan_push)

    @override
    def plan(self, layouts: Sequence[FlatLayout]) -> int:
        super().plan(layouts)
        numels = self.trainable_numels
        *starts, self._numel = accumulate(numels.values(), initial=0)
        self._starts = dict(zip(numels, starts, strict=True))
        return self._numel * self.dtype.itemsize if self._on_host else 0

    @override
    def allocate(self) -> None:
        for number in range(self._num_windows):
            numel = self._numel if number == self._window_of(self.world.rank) else 0
            self._windows.append(self._kind(self.world, numel, self.dtype, same_size=self._num_windows == 1))

    @override
    def mapped_memory(self) -> list[torch.Tensor]:
        return [window.tensor for window in self._windows]

    @override
    def shard(self, index: int) -> torch.Tensor:
        start = self._starts[index]
        shards = self._windows[self._window_of(self.world.rank)].tensor
        return shards[start : start + self.layouts[index].shard_numel]

    @override
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        assert gradient.dtype == self.dtype
        layout, values = self.layouts[index], as_mpi_buffer(gradient)
        self.traffic.add(layout, self.dtype.itemsize, start, start + gradient.numel())
        what = f"accumulating the gradient of unit {layout.name}"
        owners, by_window = self._plan_of(layout.shard_numel, start, start + gradient.numel())
        with self.world.deadline(what, owners):
            for number, to_send in by_window.items():
                self._windows[number].accumulate_messages(values, to_send, self._starts[index])
        # Local completion, after which the buffer may be reused. `flush` completes the operation at the targets.
        return deferred_flush(self.world, self._flush_local, what, owners, gradient)

    @override
    def flush(self) -> None:
        with self.world.deadline("flushing gradients"):
            for window in self._windows:
                window.flush()

    @override
    def complete(self) -> None:
        self.sync()

    @override
    def sync(self) -> None:
        for window in self._windows:
            window.sync()

    @override
    def free(self) -> None:
        while self._windows:
            self._windows.pop().free()

    def _plan_push(self, shard_numel: int, start: int, stop: int) -> tuple[tuple[int, ...], dict[int, list[Message]]]:
        by_window: dict[int, list[Message]] = {}
        ranges = tuple(ranges_by_owner(shard_numel, self.world.rank, start, stop))
        for owner, begin, end in ranges:
            to_send = messages(owner, begin - owner * shard_numel, end - begin, begin - start)
            by_window.setdefault(self._window_of(owner), []).extend(to_send)
        return tuple(owner for owner, _, _ in ranges), by_window

    def _window_of(self, owner: int) -> int:
        return owner % self._num_windows

    def _flush_local(self) -> None:
        for window in self._windows:
            window.flush_local()

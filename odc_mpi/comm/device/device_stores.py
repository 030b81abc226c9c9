"""Where the model computes on a device and the shards are there too, in windows over its memory.

Nothing goes by way of the host: a fetch reads the owners' devices into a buffer on this rank's, and a push leaves from
there. What MPI does and what the device does know nothing of each other, so this says when each may begin:

    fetch     the kernels that read the buffer's old content are done; Gets from the other owners, meanwhile a copy of
              the own part on a stream of its own; a flush, and the mark behind the copy. Then it may be read
    push      the kernels that made the gradient are done; then it is reduced; then its buffer may be written again
    A         as on the host: all pushes are flushed, then all meet. What kernels are given from then on reads the sums
    B         what the owner was having written and cleared is done; then all meet. From then on others read and add

Each wait is for a mark behind what was given at one moment (an event), never for the device; fetches and pushes wait in
the threads that carry them out, beside the computation.
"""

from collections.abc import Sequence
from functools import partial

import torch
from typing_extensions import override

from odc_mpi.comm.buffers import BufferPool
from odc_mpi.comm.device.device import BufferEvents, Device, Event
from odc_mpi.comm.shard_storage import Layout, ShardStorage
from odc_mpi.comm.transport import GradientStore, ParameterStore
from odc_mpi.comm.windows.parameters import ParameterWindows
from odc_mpi.comm.work import DeferredWork, Work


class DeviceParameters(ParameterStore):
    """Parameters from windows on devices.

    Args:
        windows: Host the shards, on devices.
        device: Of this rank.
    """

    def __init__(self, windows: ParameterWindows, device: Device) -> None:
        # Not torch's memory: MPI may have to show it to another process or to a network card.
        super().__init__(windows.dtype, BufferPool(device.empty_for_windows))
        self._windows = windows
        self._device = device
        self._rank = windows.world.rank
        self._events = BufferEvents()

    @override
    @property
    def layouts(self) -> Sequence[Layout]:
        return self._windows.layouts

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._windows[index].tensor

    @override
    def record_event(self, buffer: torch.Tensor) -> None:
        self._events.set(buffer, self._device.record_event())

    @override
    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        return DeferredWork(partial(self._fetch, index, buffer, self._events.pop(buffer)))

    def _fetch(self, index: int, buffer: torch.Tensor, wait_for: Event) -> None:
        """Fill a buffer, whose old content is of no use to anybody behind the mark. One-sided."""
        self._device.set_current()
        wait_for.synchronize()
        self._windows.world.progress.run_tasks()
        parts = self._windows.owned_ranges(index)
        pending = self._windows.start_gets(index, [owner for owner in parts if owner != self._rank], buffer)
        if self._rank in parts:
            start, stop = parts[self._rank]
            copied = self._device.copy(buffer[start:stop], self.shard(index)[: stop - start], wait_for)
            pending.wait()
            copied.synchronize()
        else:
            pending.wait()


class DeviceGradients(GradientStore):
    """Gradients that another store pushes, once the device has made them.

    Args:
        inner: Pushes from the device's memory.
        device: Of this rank.
    """

    def __init__(self, inner: GradientStore, device: Device) -> None:
        super().__init__(inner.dtype)
        self._inner = inner
        self._device = device
        self._events = BufferEvents()

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._inner.shard(index)

    @override
    def empty(self, num_bytes: int) -> torch.Tensor:
        return self._device.empty_for_windows(num_bytes)

    @override
    def record_event(self, gradient: torch.Tensor) -> None:
        self._events.set(gradient, self._device.record_event())

    @override
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        return DeferredWork(partial(self._push, index, gradient, start, self._events.pop(gradient)))

    def _push(self, index: int, gradient: torch.Tensor, start: int, wait_for: Event) -> None:
        """Bring a gradient, which is there behind the mark, to its owners. One-sided."""
        self._device.set_current()
        wait_for.synchronize()
        self._inner.push(index, gradient, start).wait()


class DeviceSynchronizer(ShardStorage):
    """What a device was given to compute, which has to be done before others read the windows on it.

    Args:
        device: Of this rank.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    @override
    def sync(self) -> None:
        self._device.record_event().synchronize()

"""Where the model computes on a device and the shards are on the host.

Shards stay where other stores have them. What is fetched from there comes to the device through pinned memory, and
gradients go the other way:

    fetch   the other store's fetch, a view of its windows or pinned memory; copy to the device; all done
    push    copy from the device; done; the other store's push, from pinned memory

The windows themselves are registered with the device's driver, which then copies straight from them, for fetches and
for an optimizer on the device. Where the driver refuses, as it does for small arrays that share a page with another,
the processor copies into pinned memory first.

Both happen where they are waited for: in the threads that fetch and push, beside the computation. A copy begins behind
the mark that the computing thread set when it handed the memory over: a buffer is not overwritten while kernels that
were given before still read it, and a gradient does not leave before the kernels that made it are done. What a wait for
a fetch returns is there, whatever stream then reads it.

The device holds the units in use and nothing else, so a model trains whose shards do not fit on it.
"""

from collections.abc import Sequence
from functools import partial

import torch
from typing_extensions import override

from odc_mpi.comm.buffers import BufferPool
from odc_mpi.comm.device.device import BufferEvents, Device, Event
from odc_mpi.comm.device.device_stores import DeviceGradients
from odc_mpi.comm.shard_storage import Layout, ShardStorage
from odc_mpi.comm.transport import Access, GradientStore, ParameterStore
from odc_mpi.comm.work import DeferredWork, FetchWork, Work


class PinnedMemory(ShardStorage):
    """Host memory that a device copies to and from by itself: a pool, and the memory of other hosts.

    Args:
        storages: Allocated before this one.
        device: Whose driver pins the memory.

    Attributes:
        pool: Lends pinned memory.
    """

    def __init__(self, storages: Sequence[ShardStorage], device: Device) -> None:
        self.pool = BufferPool(device.empty_pinned)
        self._storages = tuple(storages)
        self._device = device
        self._registered: dict[int, torch.Tensor] = {}

    @override
    def allocate(self) -> None:
        memory = [piece for host in self._storages for piece in host.mapped_memory()]
        self._registered = {piece.data_ptr(): piece for piece in memory if self._device.register(piece)}

    @override
    def free(self) -> None:
        while self._registered:
            self._device.unregister(self._registered.popitem()[1])
        self.pool.clear()

    def is_pinned(self, array: torch.Tensor) -> bool:
        """Tell whether an array begins where memory does that the driver took."""
        return array.data_ptr() in self._registered


class StagedParameters(ParameterStore):
    """Another store's parameters, fetched to a device.

    Args:
        inner: Fetches to the host; from now on into memory of `pinned`, or in place.
        device: Where the model computes.
        pinned: Knows the hosts of `inner`.
    """

    def __init__(self, inner: ParameterStore, device: Device, pinned: PinnedMemory) -> None:
        super().__init__(inner.dtype, BufferPool(device.empty))
        inner.buffers = pinned.pool
        self._inner = inner
        self._device = device
        self._pinned = pinned
        self._events = BufferEvents()

    @override
    @property
    def layouts(self) -> Sequence[Layout]:
        return self._inner.layouts

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._inner.shard(index)

    @override
    def record_event(self, buffer: torch.Tensor) -> None:
        self._events.set(buffer, self._device.record_event())

    @override
    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        after = self._events.pop(buffer)
        return DeferredWork(partial(self._copy_to_device, self._inner.fetch(index), buffer, after))

    def _copy_to_device(self, fetch: FetchWork, buffer: torch.Tensor, wait_for: Event) -> None:
        """Bring what is fetched to the host on to the device."""
        whole = fetch.wait()
        if self._inner.access is Access.COPY or self._pinned.is_pinned(whole):
            self._device.copy(buffer, whole, wait_for).synchronize()
        else:
            # It is the windows' own memory, which the driver did not take: only the processor can copy from it.
            pinned = self._pinned.pool.acquire(whole.numel(), whole.dtype)
            pinned.copy_(whole)
            self._device.copy(buffer, pinned, wait_for).synchronize()
            self._pinned.pool.release(pinned)
        self._inner.release(whole)


class StagedGradients(DeviceGradients):
    """Gradients that come from a device, and that another store pushes from the host.

    Args:
        inner: Pushes from the host.
        device: Where the model computes.
        pinned: Lends the memory on the way.
    """

    def __init__(self, inner: GradientStore, device: Device, pinned: PinnedMemory) -> None:
        super().__init__(inner, device)
        self._pinned = pinned

    @override
    def empty(self, num_bytes: int) -> torch.Tensor:
        return self._device.empty(num_bytes)

    @override
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        after = self._events.pop(gradient)
        pinned = self._pinned.pool.acquire(gradient.numel(), self.dtype)
        copied = self._device.copy(pinned, gradient, after)
        return DeferredWork(partial(self._push_pinned, index, start, pinned, copied))

    def _push_pinned(self, index: int, start: int, pinned: torch.Tensor, copy_event: Event) -> None:
        """Push what has come from the device."""
        copy_event.synchronize()
        self._inner.push(index, pinned, start).wait()
        self._pinned.pool.release(pinned)

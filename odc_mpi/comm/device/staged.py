"""Stores for models on a GPU whose shards are in host memory.

Each store wraps an inner store with shards in host memory. Parameters and gradients pass through pinned memory:

    fetch   the inner store fetches into pinned memory or returns a view of a window; copy to the device
    push    copy from the device into pinned memory, from which the inner store pushes

The windows are registered with the CUDA driver, so that fetches and an optimizer on the device can copy from them
directly. If the driver refuses, for example because small arrays share a page, the CPU first copies the array into
pinned memory.

Fetches and pushes complete in `wait()`, on the threads that fetch and push, and thus overlap with computation. A copy
waits for the event that the computing thread has recorded for the buffer. A buffer is therefore not overwritten while
kernels enqueued earlier still read it, and a gradient is not copied before the kernels that compute it have finished.
After `wait()`, a fetched array may be read on any stream.

The device holds only the units in use, so a model's shards may be larger than device memory.
"""

from collections.abc import Sequence
from functools import partial

import torch
from typing_extensions import override

from odc_mpi.comm.buffers import BufferPool, copy_host
from odc_mpi.comm.device.device import BufferEvents, Device
from odc_mpi.comm.device.device_stores import DeviceGradients
from odc_mpi.comm.layout import FlatLayout
from odc_mpi.comm.shard_storage import ShardStorage
from odc_mpi.comm.transport import Access, GradientStore, ParameterStore
from odc_mpi.comm.work import FetchWork, Work


class PinnedMemory(ShardStorage):
    """Pinned host memory: a buffer pool, and the memory of `storages`, which must be allocated first."""

    def __init__(self, storages: Sequence[ShardStorage], device: Device) -> None:
        self.pool = BufferPool(device.empty_pinned)
        self._storages = tuple(storages)
        self._device = device
        self._registered: list[torch.Tensor] = []

    @override
    def allocate(self) -> None:
        memory = [tensor for storage in self._storages for tensor in storage.mapped_memory()]
        self._registered = [tensor for tensor in memory if self._device.register(tensor)]

    @override
    def free(self) -> None:
        while self._registered:
            self._device.unregister(self._registered.pop())
        self.pool.clear()

    def is_pinned(self, array: torch.Tensor) -> bool:
        """Return True if `array` begins in memory of `storages` that the CUDA driver has pinned."""
        return any(0 <= array.data_ptr() - tensor.data_ptr() < tensor.nbytes for tensor in self._registered)


class StagedParameters(ParameterStore):
    """Parameter store that uses the store `inner` to fetch arrays to the host and copies them to a device.

    Args:
        inner: Store with shards in host memory. From now on, it acquires its buffers from `pinned`.
        pinned: Pinned memory, whose `storages` must include the storage of `inner`.
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
    def layouts(self) -> Sequence[FlatLayout]:
        return self._inner.layouts

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._inner.shard(index)

    @override
    @property
    def node_cache_bytes(self) -> int:
        return self._inner.node_cache_bytes

    @override
    def take_shared_fetches(self) -> list[int]:
        return self._inner.take_shared_fetches()

    @override
    def record_event(self, buffer: torch.Tensor) -> None:
        self._events.set(buffer, self._device.record_event())

    @override
    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        after = self._events.pop(buffer)
        return Work(partial(self._copy_to_device, self._inner.fetch(index), buffer, after))

    def _copy_to_device(self, fetch: FetchWork, buffer: torch.Tensor, wait_for: torch.cuda.Event) -> None:
        array = fetch.wait()
        if self._inner.access is Access.COPY or self._pinned.is_pinned(array):
            self._device.copy(buffer, array, wait_for).synchronize()
        else:
            # A view of a window that the driver has not registered, from which only the CPU can copy.
            pinned = self._pinned.pool.acquire(array.numel(), array.dtype)
            copy_host(pinned, array)
            self._device.copy(buffer, pinned, wait_for).synchronize()
            self._pinned.pool.release(pinned)
        self._inner.release(array)


class StagedGradients(DeviceGradients):
    """Gradient store that copies gradients from a device to pinned host memory, from which `inner` pushes them."""

    def __init__(self, inner: GradientStore, device: Device, pinned: PinnedMemory) -> None:
        super().__init__(inner, device)
        self._pinned = pinned

    @override
    def empty(self, num_bytes: int) -> torch.Tensor:
        return self._device.empty(num_bytes)

    @override
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        pinned = self._pinned.pool.acquire(gradient.numel(), self.dtype)
        copied = self._device.copy(pinned, gradient, self._events.pop(gradient))
        return Work(partial(self._push_pinned, index, start, pinned, copied))

    def _push_pinned(self, index: int, start: int, pinned: torch.Tensor, copy_event: torch.cuda.Event) -> None:
        copy_event.synchronize()
        self._inner.push(index, pinned, start).wait()
        self._pinned.pool.release(pinned)

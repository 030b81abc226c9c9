"""Stores for models on a GPU with shards in host memory.

The shards belong to an inner store in host memory. Data passes through pinned memory:

    fetch   fetch of the inner store, into pinned memory or as a view of its windows; copy to the device
    push    copy from the device into pinned memory; push of the inner store from there

The windows are registered with the CUDA driver, which then copies directly from them, for fetches and for an optimizer
on the device. If the driver refuses, as it does for small arrays that share a page with another, the CPU copies into
pinned memory first.

Both run in `wait()`, in the threads that fetch and push, overlapped with computation. A copy waits for the event that
the computing thread recorded for the memory: a buffer is not overwritten while kernels enqueued earlier still read it,
and a gradient is not copied before the kernels that compute it have finished. After `wait()` a fetched
array may be read on any stream.

The device holds only the units in use, so the shards of a model may be larger than device memory.
"""

from collections.abc import Sequence
from functools import partial

import torch
from typing_extensions import override

from odc_mpi.comm.buffers import BufferPool
from odc_mpi.comm.device.device import BufferEvents, Device
from odc_mpi.comm.device.device_stores import DeviceGradients
from odc_mpi.comm.shard_storage import Layout, ShardStorage
from odc_mpi.comm.transport import Access, GradientStore, ParameterStore
from odc_mpi.comm.work import DeferredWork, FetchWork, Work


class PinnedMemory(ShardStorage):
    """Pinned host memory: a pool of buffers, and the mapped memory of `storages`, allocated before this one."""

    def __init__(self, storages: Sequence[ShardStorage], device: Device) -> None:
        self.pool = BufferPool(device.empty_pinned)
        self._storages = tuple(storages)
        self._device = device
        self._registered: dict[int, torch.Tensor] = {}

    @override
    def allocate(self) -> None:
        memory = [tensor for storage in self._storages for tensor in storage.mapped_memory()]
        self._registered = {tensor.data_ptr(): tensor for tensor in memory if self._device.register(tensor)}

    @override
    def free(self) -> None:
        while self._registered:
            self._device.unregister(self._registered.popitem()[1])
        self.pool.clear()

    def is_pinned(self, array: torch.Tensor) -> bool:
        """Return True if an array begins at the start of registered memory."""
        return array.data_ptr() in self._registered


class StagedParameters(ParameterStore):
    """Parameters of a store in host memory, fetched to a device.

    Args:
        inner: Store in host memory. From now on it fetches into buffers of `pinned`, or returns views.
        pinned: Pinned memory that includes the storages of `inner`.
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

    def _copy_to_device(self, fetch: FetchWork, buffer: torch.Tensor, wait_for: torch.cuda.Event) -> None:
        array = fetch.wait()
        if self._inner.access is Access.COPY or self._pinned.is_pinned(array):
            self._device.copy(buffer, array, wait_for).synchronize()
        else:
            # A view of a window that the driver did not register: only the CPU can copy from it.
            pinned = self._pinned.pool.acquire(array.numel(), array.dtype)
            pinned.copy_(array)
            self._device.copy(buffer, pinned, wait_for).synchronize()
            self._pinned.pool.release(pinned)
        self._inner.release(array)


class StagedGradients(DeviceGradients):
    """Gradient store that copies gradients from a device to pinned memory, and pushes them from there by `inner`."""

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
        return DeferredWork(partial(self._push_pinned, index, start, pinned, copied))

    def _push_pinned(self, index: int, start: int, pinned: torch.Tensor, copy_event: torch.cuda.Event) -> None:
        copy_event.synchronize()
        self._inner.push(index, pinned, start).wait()
        self._pinned.pool.release(pinned)

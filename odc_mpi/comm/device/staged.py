"""Stores for models on a GPU whose shards are in host memory.

Each store wraps an inner store with shards in host memory, and pinned memory for data that the GPU cannot copy itself:

    fetch   copies of mapped shards from their windows to the device; the inner store fetches other shards into pinned
            memory, from where they are copied to the device
    push    copy from the device into pinned memory, from which the inner store pushes

The windows are registered with the CUDA driver, so that fetches and an optimizer on the device can copy from them
directly. If the driver refuses, the CPU first copies the shards into pinned memory.

The stream that uses a fetched array waits for the copies to the device. The host waits only to reuse pinned buffers,
and before this rank reports its gradients as complete, because owners may then write to the windows. Each copy waits
for an event that the computing thread has recorded, so no buffer is overwritten while earlier kernels read it, and no
gradient is copied before it is computed.
"""

import threading
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
from typing_extensions import override

from odc_mpi.comm.buffers import BufferPool, copy_host, storage_address
from odc_mpi.comm.device.device import Device
from odc_mpi.comm.device.device_stores import DeviceGradients
from odc_mpi.comm.layout import FlatLayout
from odc_mpi.comm.transport import GradientStore, ParameterStore, ShardStorage
from odc_mpi.comm.windows.parameters import WindowParameters
from odc_mpi.comm.work import FetchWork, Work

#: Maximum number of pinned buffers from which copies to the device are in flight.
MAX_COPIES = 2


class PinnedMemory(ShardStorage):
    """Pinned host memory: a buffer pool and the memory of `storages`, which must be allocated first."""

    def __init__(self, storages: Sequence[ShardStorage], device: Device) -> None:
        self.pool = BufferPool(device.empty_pinned)
        self._storages = tuple(storages)
        self._device = device
        self._registered: list[torch.Tensor] = []
        self._copies: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._lock = threading.Lock()

    @override
    def allocate(self) -> None:
        memory = [tensor for storage in self._storages for tensor in storage.mapped_memory()]
        self._registered = [tensor for tensor in memory if self._device.register(tensor)]

    @override
    def flush(self) -> None:
        self._device.finish_fetches()  # the owners of the windows may write to them afterwards
        self._release_copied(0)

    @override
    def free(self) -> None:
        self.flush()
        while self._registered:
            self._device.unregister(self._registered.pop())
        self.pool.clear()

    def is_pinned(self, array: torch.Tensor) -> bool:
        """Return True if `array` begins in memory of `storages` that the CUDA driver has pinned."""
        return any(0 <= array.data_ptr() - tensor.data_ptr() < tensor.nbytes for tensor in self._registered)

    def release_after(self, event: torch.cuda.Event, buffer: torch.Tensor) -> None:
        """Release a pool buffer once the copy from it is complete. `event` must have been recorded after the copy.

        If more than `MAX_COPIES` copies are in flight, this method waits for the oldest ones.
        """
        self._copies.append((event, buffer))
        self._release_copied(MAX_COPIES)

    def _release_copied(self, num_left: int) -> None:
        with self._lock:
            while len(self._copies) > num_left:
                event, buffer = self._copies.popleft()
                event.synchronize()
                self.pool.release(buffer)


class StagedParameters(ParameterStore):
    """Parameter store that copies arrays to a device from the store `inner`, which is in host memory."""

    def __init__(self, inner: ParameterStore, device: Device, pinned: PinnedMemory) -> None:
        super().__init__(inner.dtype, BufferPool(device.empty))
        self._inner = inner
        self._device = device
        self._pinned = pinned
        self._events: dict[int, torch.cuda.Event] = {}  # by the address of a buffer

    @override
    @property
    def layouts(self) -> Sequence[FlatLayout]:
        return self._inner.layouts

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._inner.shard(index)

    @override
    def record_event(self, buffer: torch.Tensor) -> None:
        self._events[storage_address(buffer)] = self._device.record_event()

    @override
    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        wait_for = self._events.pop(storage_address(buffer))
        return Work(partial(self._copy_array, self._inner.fetch(index), buffer, wait_for))

    def _copy_array(self, fetch: FetchWork, buffer: torch.Tensor, wait_for: torch.cuda.Event) -> torch.cuda.Event:
        array = fetch.wait()
        copied = self._copy(buffer, array, wait_for)
        self._inner.release(array)
        return copied

    def _copy(self, target: torch.Tensor, view: torch.Tensor, wait_for: torch.cuda.Event) -> torch.cuda.Event:
        if self._pinned.is_pinned(view):
            return self._device.copy(target, view, wait_for)
        pinned = self._pinned.pool.acquire(view.numel(), view.dtype)
        copy_host(pinned, view)
        copied = self._device.copy(target, pinned, wait_for)
        self._pinned.release_after(copied, pinned)
        return copied


class StagedWindowParameters(StagedParameters):
    """Staged store whose inner store is in windows, of which each mapped shard is copied to the device by itself."""

    def __init__(self, inner: WindowParameters, device: Device, pinned: PinnedMemory) -> None:
        super().__init__(inner, device, pinned)
        self._windows = inner

    @override
    @property
    def enqueues_only(self) -> bool:
        return not self._windows.transfers and all(map(self._pinned.is_pinned, self._windows.mapped_memory()))

    @override
    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        if self._windows.transfers:
            return self._start_gets(index, buffer, self._events.pop(storage_address(buffer)))
        copy = super().start_fetch(index, buffer)
        if not self.enqueues_only:
            return copy
        copied = copy.complete()
        return Work(lambda: copied)

    def _start_gets(self, index: int, buffer: torch.Tensor, wait_for: torch.cuda.Event) -> Work:
        """Start fetching unmapped shards into pinned memory, and copying mapped shards to the device."""
        windows, data, copied = self._windows, buffer.view(torch.uint8), None
        windows.world.progress.run_tasks()
        windows.traffic.add(windows.layouts[index], windows.dtype_of(index).itemsize)
        plan = windows.fetch_plan(index)
        for owner, start, stop in plan.mapped:
            copied = self._copy(data[start:stop], windows.mapped_bytes(index, owner)[: stop - start], wait_for)
        if not plan.gets:
            return Work(lambda: copied)
        pinned = self._pinned.pool.acquire(data.numel(), torch.uint8)
        gets = windows.start_gets(index, pinned)
        return Work(partial(self._copy_fetched, plan.unmapped, gets, pinned, data, wait_for))

    def _copy_fetched(
        self,
        ranges: Sequence[tuple[int, int]],
        gets: Work,
        pinned: torch.Tensor,
        data: torch.Tensor,
        wait_for: torch.cuda.Event,
    ) -> torch.cuda.Event:
        """Complete Gets into pinned memory, and start copying `ranges` of it to the device."""
        gets.wait()
        copied = [self._device.copy(data[start:stop], pinned[start:stop], wait_for) for start, stop in ranges]
        self._pinned.release_after(copied[-1], pinned)
        return copied[-1]


class StagedGradients(DeviceGradients):
    """Gradient store that copies gradients from a device to pinned host memory, from which `inner` pushes them."""

    def __init__(self, inner: GradientStore, device: Device, pinned: PinnedMemory) -> None:
        super().__init__(inner, device)
        self._pinned = pinned
        self._copies: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}  # by the address of a gradient

    @override
    def empty(self, num_bytes: int) -> torch.Tensor:
        return self._device.empty(num_bytes)

    @override
    def prepare_push(self, gradient: torch.Tensor) -> None:
        # Already here, because the thread that pushes may be busy with earlier pushes.
        pinned = self._pinned.pool.acquire(gradient.numel(), self.dtype)
        copied = self._device.copy(pinned, gradient, self._device.record_event())
        self._copies[storage_address(gradient)] = pinned, copied

    @override
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        return Work(partial(self._push_pinned, index, start, *self._copies.pop(storage_address(gradient))))

    def _push_pinned(self, index: int, start: int, pinned: torch.Tensor, copied: torch.cuda.Event) -> None:
        copied.synchronize()
        self._inner.push(index, pinned, start).wait()
        self._pinned.pool.release(pinned)

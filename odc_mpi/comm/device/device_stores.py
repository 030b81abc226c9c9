"""Stores for models on a GPU whose shards are in device memory: in device windows, or of a single rank.

The stores of a single rank communicate nothing: a fetch returns a view of the full array, and gradients are added to
their sums on the current stream, in whose order the optimizer runs after the backward pass and before the next forward
pass.

The windows (`comm.windows.device_window`) are those of MPI, or memory that the ranks of a node map, which is copied
without MPI.

MPI and CUDA do not synchronize with each other, so the stores synchronize them:

    fetch                  wait for the kernels that read the buffer's old content; MPI_Get from the other owners,
                           overlapped with copies of mapped shards on a separate stream; flush. The stream that uses the
                           buffer waits for the copies. If all shards are mapped, nothing waits on the host
    push                   wait for the kernels that compute the gradient; push it to the owners
    gradients complete     wait for the copies; then as with host memory: flush all pushes, all-gather; kernels enqueued
                           later read the sums
    parameters published   wait for the kernels that update parameters and clear gradients; barrier

Each wait is for a single event, never for the whole device. Fetches and pushes wait on the threads that run them, so
the waits overlap with computation.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from typing_extensions import override

from odc_mpi.comm.buffers import BufferPool, storage_address
from odc_mpi.comm.device.device import Device, zeros
from odc_mpi.comm.layout import FlatLayout
from odc_mpi.comm.transport import GradientStore, ParameterStore, ShardStorage
from odc_mpi.comm.windows.parameters import WindowParameters
from odc_mpi.comm.windows.rma import Window
from odc_mpi.comm.work import Work
from odc_mpi.runtime.world import World


class DeviceParameters(WindowParameters):
    """Parameter store with its shards in a device window that `kind` creates. Fetches fill buffers on `device`."""

    def __init__(self, world: World, dtype: torch.dtype, device: Device, kind: Callable[..., Window]) -> None:
        super().__init__(world, dtype, kind)
        # Not from the torch allocator, because MPI may have to export it to another process or to a network card.
        self.buffers = BufferPool(device.empty_for_windows)
        self._device = device
        self._events: dict[int, torch.cuda.Event] = {}  # by the address of a buffer

    @override
    def plan(self, layouts: Sequence[FlatLayout]) -> int:
        super().plan(layouts)
        return 0  # no host memory

    @override
    def record_event(self, buffer: torch.Tensor) -> None:
        self._events[storage_address(buffer)] = self._device.record_event()

    @override
    @property
    def enqueues_only(self) -> bool:
        return self.maps_all_shards

    @override
    def flush(self) -> None:
        self._device.finish_fetches()  # the owners of the shards may write to them afterwards

    @override
    def free(self) -> None:
        self._device.finish_fetches()  # other ranks may free their memory afterwards
        super().free()

    @override
    def sync(self) -> None:
        # Kernels that write to the windows may still be enqueued.
        self._device.record_event().synchronize()
        super().sync()

    @override
    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        self.traffic.add(self.layouts[index], self.dtype_of(index).itemsize)
        wait_for = self._events.pop(storage_address(buffer))
        if self.enqueues_only:
            self.world.progress.run_tasks()
            copied = self._copy_mapped(index, buffer, wait_for)
            return Work(lambda: copied)
        return Work(partial(self._fetch, index, buffer, wait_for))

    def _fetch(self, index: int, buffer: torch.Tensor, wait_for: torch.cuda.Event) -> torch.cuda.Event | None:
        self._device.set_current()
        wait_for.synchronize()
        self.world.progress.run_tasks()
        gets = self.start_gets(index, buffer)
        copied = self._copy_mapped(index, buffer, wait_for)
        gets.wait()
        return copied

    def _copy_mapped(self, index: int, buffer: torch.Tensor, wait_for: torch.cuda.Event) -> torch.cuda.Event | None:
        data, event = buffer.view(torch.uint8), None
        for owner, start, stop in self.fetch_plan(index).mapped:
            event = self._device.copy(data[start:stop], self.mapped_bytes(index, owner)[: stop - start], wait_for)
        return event


class DeviceGradients(GradientStore):
    """Gradient store that waits for the kernels that compute a gradient before the store `inner` pushes it."""

    def __init__(self, inner: GradientStore, device: Device) -> None:
        super().__init__(inner.dtype)
        self._inner = inner
        self._device = device
        self._events: dict[int, torch.cuda.Event] = {}  # by the address of a buffer

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._inner.shard(index)

    @override
    def empty(self, num_bytes: int) -> torch.Tensor:
        return self._device.empty_for_windows(num_bytes)

    @override
    def prepare_push(self, gradient: torch.Tensor) -> None:
        self._events[storage_address(gradient)] = self._device.record_event()

    @override
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        return Work(partial(self._push, index, gradient, start, self._events.pop(storage_address(gradient))))

    def _push(self, index: int, gradient: torch.Tensor, start: int, wait_for: torch.cuda.Event) -> None:
        self._device.set_current()
        wait_for.synchronize()
        self._inner.push(index, gradient, start).wait()


class _DeviceShards(ShardStorage):
    """Base class for stores with shards in device memory. Subclasses set `_shards`, by array index, in `allocate`."""

    def __init__(self, dtype: torch.dtype, device: Device) -> None:
        super().__init__(dtype)  # type: ignore[call-arg] # of `ParameterStore` or `GradientStore`
        self._device = device
        self._shards: dict[int, torch.Tensor] = {}

    def shard(self, index: int) -> torch.Tensor:
        return self._shards[index]

    @override
    def free(self) -> None:
        self._shards.clear()


class SingleRankParameters(_DeviceShards, ParameterStore):
    """Single-rank parameter store that keeps full arrays in device memory."""

    transfers, stays_valid = False, True

    @override
    def allocate(self) -> None:
        shards = (zeros(self._device, layout.shard_numel, layout.dtype or self.dtype) for layout in self.layouts)
        self._shards = dict(enumerate(shards))

    @override
    def acquire_buffer(self, index: int) -> torch.Tensor:
        return self._shards[index][: self.layouts[index].numel]

    @override
    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        return Work()

    @override
    def release(self, fetched: torch.Tensor) -> None:
        pass  # the memory remains allocated


class SingleRankGradients(_DeviceShards, GradientStore):
    """Single-rank gradient store that keeps full arrays in device memory."""

    is_local = True

    @override
    def allocate(self) -> None:
        self._shards = {index: zeros(self._device, numel, self.dtype) for index, numel in self.trainable_numels.items()}

    @override
    def empty(self, num_bytes: int) -> torch.Tensor:
        return self._device.empty(num_bytes)

    @override
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        self._shards[index][start : start + gradient.numel()].add_(gradient)
        return Work()

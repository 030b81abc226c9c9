"""Shards and mailbox slots on a device. Elements are in device memory, headers in host memory.

`add` returns after the device has finished, so no slot is overwritten while the device reads it. The caller of `put`
must have waited for the kernels that compute the elements.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from odc_mpi.comm.device.device import Device, zeros
from odc_mpi.comm.kernels.native import Segment
from odc_mpi.comm.reduce.slots import HostSlots, Slot
from odc_mpi.comm.windows.device_window import DeviceWindow, MappedDeviceWindow
from odc_mpi.comm.windows.rma import Memory, Window, as_mpi_buffer
from odc_mpi.runtime.world import World


class DeviceSlots(HostSlots):
    """Shards and rings of this rank, both in device memory."""

    in_inbox = False

    def __init__(self, world: World, dtype: torch.dtype, device: Device) -> None:
        super().__init__(world, dtype)
        self._device = device

    @override
    def allocate(self, inbox: Window, rings_start: int, rings_bytes: int, numels: Mapping[int, int]) -> None:
        self._window = self._make_window(rings_bytes)
        self._rings_start = 0
        self.shards = {index: zeros(self._device, numel, self.dtype) for index, numel in numels.items()}

    def _make_window(self, num_bytes: int) -> Any:
        return DeviceWindow(self.world, num_bytes, torch.uint8, self._device)

    @override
    def values(self, gradient: torch.Tensor) -> Memory:
        return as_mpi_buffer(gradient)

    @override
    def flush(self) -> None:
        self._window.flush()

    @override
    def add(self, slots: Sequence[Slot]) -> None:
        segments: dict[int, list[Segment]] = {}
        for index, start, numel, offset in slots:
            values = self._window.tensor[offset : offset + numel * self.dtype.itemsize].view(self.dtype)
            segments.setdefault(index, []).append((start, values))
        self._window.sync()
        self._add_on_device(segments)

    @override
    def add_own_shard(self, index: int, start: int, values: torch.Tensor) -> None:
        self._add_on_device({index: [(start, values)]})

    @override
    def free(self) -> None:
        self.shards = {}
        self._window.free()

    def _add_on_device(self, slots: Mapping[int, list[Segment]]) -> None:
        for event in [self._device.add_segments(self.shards[index], segments) for index, segments in slots.items()]:
            event.synchronize()


class MappedDeviceSlots(DeviceSlots):
    """Shards and rings in device memory. The ranks of a node map the rings, so MPI transfers no elements."""

    def __init__(self, world: World, dtype: torch.dtype, device: Device) -> None:
        super().__init__(world, dtype, device)
        self._copied: torch.cuda.Event | None = None

    @override
    def _make_window(self, num_bytes: int) -> Any:
        return MappedDeviceWindow(self.world, num_bytes, torch.uint8, self._device)

    @override
    def values(self, gradient: torch.Tensor) -> Any:
        return gradient.view(torch.uint8)

    @override
    def put(self, owners: np.ndarray, offsets: np.ndarray, values: Any, numels: np.ndarray, firsts: np.ndarray) -> None:
        itemsize = self.dtype.itemsize
        for owner, offset, numel, first in zip(*(x.tolist() for x in (owners, offsets, numels, firsts)), strict=True):
            ring = self._window.mapped_shard(owner)
            assert ring is not None
            target = ring[offset : offset + numel * itemsize]
            self._copied = self._device.copy_to_peer(target, values[first * itemsize : (first + numel) * itemsize])

    @override
    def flush(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

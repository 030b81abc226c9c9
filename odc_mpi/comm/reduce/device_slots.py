"""Shards and mailbox slots on a device. Elements are in device memory, headers in host memory.

    put     Put the elements into the window on the owner's device
    flush   complete the Puts at the owner
    add     on the owner, the device adds the elements in the order of the headers

`add` returns after the device has finished, so no slot is overwritten while the device reads it. The caller of `put`
must have waited for the kernels that compute the elements.
"""

from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from odc_mpi.comm.device.device import Device, zeros
from odc_mpi.comm.kernels.native import Segment
from odc_mpi.comm.reduce.slots import HostSlots, Slot
from odc_mpi.comm.windows.device_window import DeviceWindow
from odc_mpi.comm.windows.rma import Memory, Window, as_mpi_buffer
from odc_mpi.runtime.world import World


class DeviceSlots(HostSlots):
    """Shards of this rank and rings in device memory."""

    in_inbox = False

    def __init__(self, world: World, dtype: torch.dtype, device: Device) -> None:
        super().__init__(world, dtype)
        self._device = device

    @override
    def allocate(self, inbox: Window, rings_start: int, rings_bytes: int, numels: Mapping[int, int]) -> None:
        self._window = DeviceWindow(self.world, rings_bytes, torch.uint8, self._device)
        self._rings_start = 0
        self.shards = {index: zeros(self._device, numel, self.dtype) for index, numel in numels.items()}

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

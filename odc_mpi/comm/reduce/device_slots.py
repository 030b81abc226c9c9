"""Shards and mailbox slots on a device, with elements in device memory and headers in host memory.

    put     Put the header into the owner's inbox, and the elements into the window on the owner's device
    flush   complete both Puts at the owner
    add     on the owner, the CPU reads the headers, and the device adds the elements in the order of the headers

`add` returns after the device has finished, so no slot is overwritten while the device reads it. Before calling `put`,
wait for the kernels that compute the elements.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from typing_extensions import override

from odc_mpi.comm.device.device import Device, zeros
from odc_mpi.comm.kernels.native import Segment
from odc_mpi.comm.reduce.slots import HEADER_BYTES, Header, HostSlots, Index, ring_index
from odc_mpi.comm.windows.device_window import DeviceWindow
from odc_mpi.comm.windows.rma import Memory, Window, as_mpi_buffer
from odc_mpi.runtime.world import World


class DeviceSlots(HostSlots):
    """Gradient shards and received gradient elements in device memory, with the headers in host memory."""

    #: Slots begin at multiples of 4096 bytes in a ring, so the headers take up 1/128 of its size in host memory.
    alignment = 4096
    values_offset = 0

    def __init__(self, world: World, dtype: torch.dtype, device: Device) -> None:
        super().__init__(world, dtype)
        self._device = device

    @override
    def host_ring_bytes(self, ring_bytes: int) -> int:
        return ring_bytes // self.alignment * HEADER_BYTES

    @override
    def allocate(self, inbox: Window, rings_start: int, ring_bytes: int, numels: Mapping[int, int]) -> None:
        super().allocate(inbox, rings_start, ring_bytes, numels)
        self._elements = DeviceWindow(self.world, (self.world.size - 1) * ring_bytes, torch.uint8, self._device)

    @override
    def values(self, gradient: torch.Tensor) -> Memory:
        return as_mpi_buffer(gradient)

    @override
    def put(self, owners: np.ndarray, headers: np.ndarray, values: Memory, firsts: np.ndarray) -> None:
        self._put_headers(owners, headers)
        starts = self._elements_start(self.world.rank, owners, headers[:, 3] % self.ring_bytes)
        self._elements.put_messages(values, self._messages(owners, starts, headers[:, 2], firsts))

    @override
    def flush(self) -> None:
        self._elements.flush()
        self._inbox.flush()

    @override
    def add(self, origin: int, headers: Sequence[Header]) -> None:
        slots: dict[int, list[Segment]] = {}
        for index, start, numel, offset in headers:
            at = self._elements_start(origin, self.world.rank, offset)
            values = self._elements.tensor[at : at + numel * self.dtype.itemsize].view(self.dtype)
            slots.setdefault(index, []).append((start, values))
        self._elements.sync()
        self._add_on_device(slots)

    @override
    def add_own_shard(self, index: int, start: int, values: torch.Tensor) -> None:
        self._add_on_device({index: [(start, values)]})

    @override
    def free(self) -> None:
        super().free()
        self._elements.free()

    def _make_shards(self, numels: Mapping[int, int]) -> None:
        self.shards = {index: zeros(self._device, numel, self.dtype) for index, numel in numels.items()}

    def _add_on_device(self, slots: Mapping[int, list[Segment]]) -> None:
        for event in [self._device.add_segments(self.shards[index], segments) for index, segments in slots.items()]:
            event.synchronize()

    def _header_start(self, origin: Index, owner: Index, offset: Index) -> Index:
        return super()._header_start(origin, owner, offset // self.alignment * HEADER_BYTES)

    def _elements_start(self, origin: Index, owner: Index, offset: Index) -> Index:
        return ring_index(origin, owner) * self.ring_bytes + offset

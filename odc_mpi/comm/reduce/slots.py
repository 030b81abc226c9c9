"""Shards and mailbox slots in host or device memory, and the addition of slots to shards.

A slot is a part of a received gradient: elements in a ring, and a header in the inbox, in host memory.
`comm.reduce.mailbox` determines when a rank may write to a slot.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from odc_mpi.comm.device.device import Device, zeros
from odc_mpi.comm.kernels.native import Segment
from odc_mpi.comm.windows.device_window import DeviceWindow, MappedDeviceWindow
from odc_mpi.comm.windows.rma import Memory, Message, Window, as_mpi_buffer
from odc_mpi.runtime.world import World


class Slot(NamedTuple):
    """Received slot: `numel` elements at byte `offset` of the rings, to add to a shard starting at element `start`."""

    array: int
    start: int
    numel: int
    offset: int


class HostSlots:
    """This rank's shards in private memory (`shards`, keyed by array index), and its rings in its inbox."""

    #: True if the rings are in the inbox.
    in_inbox = True

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self.world = world
        self.dtype = dtype
        self.shards: dict[int, torch.Tensor] = {}
        # Not `_drain_lock` of the mailbox, whose holder may wait for other ranks. An addition never waits.
        self._add_lock = threading.Lock()

    def allocate(self, inbox: Window, rings_start: int, rings_bytes: int, numels: Mapping[int, int]) -> None:
        """Allocate the shards, and the rings if they are not in the inbox. Collective.

        Args:
            inbox: Window that contains the headers and, if `in_inbox` is True, rings starting at byte `rings_start`.
            rings_bytes: Total size of this rank's rings, in bytes.
            numels: Number of elements in this rank's shard, by array index.
        """
        self._window, self._rings_start = inbox, rings_start
        self._memory = inbox.tensor.numpy()[rings_start:]
        self.shards = {index: torch.zeros(numel, dtype=self.dtype) for index, numel in numels.items()}

    def values(self, gradient: torch.Tensor) -> Memory:
        """Return a gradient's memory, to be passed to `put`."""
        return gradient.numpy()

    def put(
        self, owners: np.ndarray, offsets: np.ndarray, values: Memory, numels: np.ndarray, firsts: np.ndarray
    ) -> None:
        """Start writing elements to the rings of `owners`, int64 `[n]`, one slot at each owner. One-sided.

        If `in_inbox` is True, flushing the inbox completes the writes. Otherwise, `flush` completes them.

        Args:
            offsets: Offset of each slot in the memory of its owner's rings, in bytes, int64 `[n]`.
            values: Gradient memory, as returned by the `values` method. Do not modify the gradient before the flush.
            firsts: Index in the gradient of the first element of each slot, int64 `[n]`.
        """
        itemsize = self.dtype.itemsize
        messages = to_messages(owners, self._rings_start + offsets, numels * itemsize, firsts * itemsize)
        self._window.put_messages(values, messages)

    def flush(self) -> None:
        """Complete the writes of elements at all owners, except for Puts into their inboxes. One-sided."""

    def add(self, slots: Sequence[Slot]) -> None:
        """Add received slots to the shards, in order. On return, the slots may be overwritten."""
        for index, start, numel, offset in slots:
            values = self._memory[offset : offset + numel * self.dtype.itemsize]
            self._add(index, start, values.view(self.shards[index].numpy().dtype))

    def add_own_shard(self, index: int, start: int, values: torch.Tensor) -> None:
        """Add this rank's part of a gradient to its shard, starting at element `start`."""
        self._add(index, start, values.numpy())

    def free(self) -> None:
        """Release all memory. Collective. Call this before the inbox is freed."""
        self.shards = {}
        del self._memory

    def _add(self, index: int, start: int, values: np.ndarray) -> None:
        # Not torch: it would start a thread pool for every thread that adds. inf - inf needs no warning here.
        shard = self.shards[index].numpy()[start : start + values.size]
        with self._add_lock, np.errstate(all="ignore"):
            np.add(shard, values, out=shard)


class DeviceSlots(HostSlots):
    """This rank's shards and rings, both in device memory.

    Before calling `put`, wait for the kernels that compute the elements. `add` returns after the device has finished,
    so no slot is overwritten while the device reads it.
    """

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
    """Shards and rings in device memory. All ranks are on one node and map all rings, so MPI transfers no elements."""

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


def to_messages(owners: np.ndarray, starts: np.ndarray, sizes: np.ndarray, firsts: np.ndarray) -> Iterator[Message]:
    """Return one message per owner. All sizes and offsets are in bytes.

    `starts` are offsets in the owners' windows, and `firsts` are offsets in the buffer.
    """
    return zip(owners.tolist(), starts.tolist(), zip(sizes.tolist(), firsts.tolist(), strict=True), strict=True)

"""Shards and slots of a mailbox in host memory, and the addition of slots to shards.

A slot has a header and elements. Here both are in the inbox of the owner, contiguously. With `comm.reduce.device_slots`
the elements are in device memory. `comm.reduce.mailbox` decides when a rank may write to a slot.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from odc_mpi.comm.windows.rma import ALIGNMENT, Memory, Window
from odc_mpi.runtime.world import World

#: Size of a header, half of a cache line: four int64 (array, start, numel, position).
HEADER_BYTES = 32


class Header(NamedTuple):
    """Header of a slot with elements of an array from `start` of the shard on, and the byte offset in its ring."""

    array: int
    start: int
    numel: int
    offset: int


class HostSlots:
    """Shards of this rank in private memory, `shards` by array index from `allocate` on, and slots in the inbox."""

    #: Slots begin at multiples of this number of bytes in a ring.
    alignment = ALIGNMENT
    #: Offset of the elements in a slot, in bytes of the ring.
    values_offset = HEADER_BYTES
    #: Number of windows in addition to the inbox.
    num_windows = 0

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self.world = world
        self.dtype = dtype
        self.shards: dict[int, torch.Tensor] = {}
        self._sums: dict[int, np.ndarray] = {}
        # Not `_drain_lock` of the mailbox, whose holder may wait for other ranks. An addition never waits.
        self._add_lock = threading.Lock()

    def host_ring_bytes(self, ring_bytes: int) -> int:
        """Return the size of a ring in the inbox, in bytes."""
        return ring_bytes

    def allocate(self, inbox: Window, rings_start: int, ring_bytes: int, numels: Mapping[int, int]) -> None:
        """Allocate shards and the memory of slots outside of the inbox. Collective; call once.

        Args:
            inbox: Window that contains all rings, contiguously.
            rings_start: Offset of the first ring in the inbox, in bytes.
            numels: Elements of this rank's shard by array index.
        """
        self._inbox, self._rings_start = inbox, rings_start
        self._ring_bytes = self.host_ring_bytes(ring_bytes)
        self._memory = inbox.tensor.numpy()
        self._make_shards(numels)

    def values(self, gradient: torch.Tensor) -> Memory:
        """Return the memory of a gradient as a buffer for MPI."""
        return gradient.numpy()

    def put(self, owner: int, offset: int, header: np.ndarray, values: Memory) -> None:
        """Start to Put a slot into this rank's ring at an owner. One-sided; `flush` completes it.

        Args:
            offset: Offset of the slot in the ring, in bytes.
            header: `[32]` bytes. Do not modify it before the flush.
            values: Part of a buffer that `values` returned. Do not modify it before the flush.
        """
        assert isinstance(values, np.ndarray)
        at = self._header_start(self.world.rank, owner, offset)
        self._inbox.put(owner, at, header)
        self._inbox.put(owner, at + HEADER_BYTES, values.view(np.uint8))

    def flush(self, owner: int | None = None) -> None:
        """Complete all Puts at an owner, by default at all owners. One-sided."""
        self._inbox.flush(owner)

    def header(self, origin: int, offset: int) -> list[int]:
        """Return the four numbers in the header of a received slot."""
        at = self._header_start(origin, self.world.rank, offset)
        return self._memory[at : at + HEADER_BYTES].view(np.int64).tolist()

    def add(self, origin: int, headers: Sequence[Header]) -> None:
        """Add received slots to the shards, in order. On return the slots may be overwritten."""
        for index, start, numel, offset in headers:
            at = self._header_start(origin, self.world.rank, offset) + HEADER_BYTES
            values = self._memory[at : at + numel * self.dtype.itemsize]
            self._add(index, start, values.view(self._sums[index].dtype))

    def add_local(self, index: int, start: int, values: torch.Tensor) -> None:
        """Add the part of a gradient that this rank owns. On return its memory may be reused."""
        self._add(index, start, values.numpy())

    def free(self) -> None:
        """Release all memory, before the inbox is freed. Collective."""
        self.shards, self._sums = {}, {}
        del self._memory

    def _make_shards(self, numels: Mapping[int, int]) -> None:
        self.shards = {index: torch.zeros(numel, dtype=self.dtype) for index, numel in numels.items()}
        self._sums = {index: shard.numpy() for index, shard in self.shards.items()}

    def _add(self, index: int, start: int, values: np.ndarray) -> None:
        # Not torch: it would start a thread pool for every thread that adds. inf - inf needs no warning here.
        shard = self._sums[index][start : start + values.size]
        with self._add_lock, np.errstate(all="ignore"):
            np.add(shard, values, out=shard)

    def _header_start(self, origin: int, owner: int, offset: int) -> int:
        return self._rings_start + ring_index(origin, owner) * self._ring_bytes + offset


def ring_index(origin: int, owner: int) -> int:
    """Return the index of an origin's ring at an owner, which has none for itself."""
    return origin - (origin > owner)

"""Shards and mailbox slots in host memory, and the addition of slots to shards.

A slot is a part of a received gradient: a header and elements. Here both are contiguous in the inbox of the owner. With
`comm.reduce.device_slots` the elements are in device memory. `comm.reduce.mailbox` determines when a rank may write to
a slot.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from odc_mpi.comm.windows.rma import ALIGNMENT, Memory, Window
from odc_mpi.runtime.world import World

#: Size of a header, half a cache line: four int64 (array, start, numel, position of the slot).
HEADER_BYTES = 32


class Header(NamedTuple):
    """Header of a received slot.

    Attributes:
        array: Index of the array.
        start: Index of the first element in the shard of this rank.
        numel: Number of elements.
        offset: Offset of the slot in its ring, in bytes.
    """

    array: int
    start: int
    numel: int
    offset: int


class HostSlots:
    """Shards of this rank in private memory (`shards`, by array index), and slots in its inbox."""

    #: Slots begin at multiples of this number of bytes in a ring.
    alignment = ALIGNMENT
    #: Offset of the elements from the start of a slot in its ring, in bytes.
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
        """Return the part of a ring of `ring_bytes` that is in the inbox, in bytes."""
        return ring_bytes

    def allocate(self, inbox: Window, rings_start: int, ring_bytes: int, numels: Mapping[int, int]) -> None:
        """Allocate the shards, and the memory of slots that is not in the inbox. Collective. Call it once.

        Args:
            inbox: Window that contains all rings, contiguously.
            rings_start: Offset of the first ring in the inbox, in bytes.
            ring_bytes: Size of a ring, in bytes.
            numels: Number of elements of this rank's shard, by array index.
        """
        self._inbox, self._rings_start = inbox, rings_start
        self._ring_bytes = self.host_ring_bytes(ring_bytes)
        self._memory = inbox.tensor.numpy()
        self._make_shards(numels)

    def values(self, gradient: torch.Tensor) -> Memory:
        """Return the memory of a gradient as a buffer that can be passed to `put`."""
        return gradient.numpy()

    def put(self, owner: int, offset: int, header: np.ndarray, values: Memory) -> None:
        """Start to Put a slot into this rank's ring in the inbox of an owner. One-sided. `flush` completes it.

        Args:
            offset: Offset of the slot in the ring, in bytes.
            header: Header as bytes, `[32]`. Do not modify it before the flush.
            values: Elements of the slot: a slice of a buffer that the method `values` returned. Do not modify it before
                the flush.
        """
        assert isinstance(values, np.ndarray)
        at = self._header_start(self.world.rank, owner, offset)
        self._inbox.put(owner, at, header)
        self._inbox.put(owner, at + HEADER_BYTES, values.view(np.uint8))

    def flush(self, owner: int | None = None) -> None:
        """Complete the Puts of this rank at `owner`, or at all owners if it is None. One-sided."""
        self._inbox.flush(owner)

    def header(self, origin: int, offset: int) -> list[int]:
        """Return the four numbers in the header of the slot at `offset` in the ring of rank `origin`."""
        at = self._header_start(origin, self.world.rank, offset)
        return self._memory[at : at + HEADER_BYTES].view(np.int64).tolist()

    def add(self, origin: int, headers: Sequence[Header]) -> None:
        """Add slots received from rank `origin` to the shards, in order. On return the slots may be overwritten."""
        for index, start, numel, offset in headers:
            at = self._header_start(origin, self.world.rank, offset) + HEADER_BYTES
            values = self._memory[at : at + numel * self.dtype.itemsize]
            self._add(index, start, values.view(self._sums[index].dtype))

    def add_own_shard(self, index: int, start: int, values: torch.Tensor) -> None:
        """Add this rank's part of a gradient to its shard, from element `start` on. Then `values` may be reused."""
        self._add(index, start, values.numpy())

    def free(self) -> None:
        """Release all memory. Collective. Call it before the inbox is freed."""
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
    """Return the index of the ring of rank `origin` in the inbox of `owner`. An owner has no ring for itself."""
    return origin - (origin > owner)

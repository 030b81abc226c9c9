"""Shards and mailbox slots in host memory, and the addition of slots to shards.

A slot holds a part of a received gradient as a header and elements. Here, the two are contiguous in the owner's inbox;
in `comm.reduce.device_slots`, the elements are in device memory. `comm.reduce.mailbox` determines when a rank may write
to a slot.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from odc_mpi.comm.windows.rma import ALIGNMENT, Memory, Message, Window
from odc_mpi.runtime.world import World

#: Size of a header, half a cache line: four int64 (array, start, numel, position of the slot).
HEADER_BYTES = 32
#: An index, or an int64 array of indices.
Index: TypeAlias = Any


class Header(NamedTuple):
    """Header of a slot, which holds a part of a gradient that this rank has received.

    Attributes:
        start: Index of the slot's first element in this rank's shard of array `array`.
        offset: Byte offset of the slot in its ring buffer.
    """

    array: int
    start: int
    numel: int
    offset: int


class HostSlots:
    """Gradient shards of this rank in private memory, and slots, the memory for parts of gradients received by Put."""

    #: Slots begin at multiples of this number of bytes in a ring.
    alignment = ALIGNMENT
    #: Byte offset of the elements from the start of a slot in its ring.
    values_offset = HEADER_BYTES

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self.world = world
        self.dtype = dtype
        self.shards: dict[int, torch.Tensor] = {}
        self._sums: dict[int, np.ndarray] = {}
        # Not the mailbox's `_drain_lock`, whose holder may wait for other ranks. An addition never waits.
        self._add_lock = threading.Lock()

    def host_ring_bytes(self, ring_bytes: int) -> int:
        """Return the size in bytes of the part of a ring buffer of `ring_bytes` that is in host memory, in the inbox."""
        return ring_bytes

    def allocate(self, inbox: Window, rings_start: int, ring_bytes: int, numels: Mapping[int, int]) -> None:
        """Allocate the shards and any slot memory outside the inbox. Collective. Call this method only once.

        Args:
            inbox: Window that contains the ring buffers of all other ranks, contiguously.
            rings_start: Byte offset of the first ring buffer in the inbox.
            numels: Number of elements in this rank's shard, by array index.
        """
        self._inbox, self._rings_start, self.ring_bytes = inbox, rings_start, ring_bytes
        self._memory = inbox.tensor.numpy()
        self._make_shards(numels)

    def values(self, gradient: torch.Tensor) -> Memory:
        """Return the memory of a gradient as a buffer that can be passed to `put`."""
        return gradient.numpy()

    def put(self, owners: np.ndarray, headers: np.ndarray, values: Memory, firsts: np.ndarray) -> None:
        """Start sending one slot, a part of a gradient, to each rank in `owners`. One-sided. `flush` completes this.

        Args:
            headers: Header of each slot, int64 `[n, 4]`, laid out as in `header`. Do not modify it before the flush.
            values: Memory of the gradient, as returned by the `values` method. Do not modify it before the flush.
            firsts: Index in the gradient of the first element of each slot, int64 `[n]`.
        """
        self._put_headers(owners, headers)
        starts = self._header_start(self.world.rank, owners, headers[:, 3] % self.ring_bytes) + HEADER_BYTES
        self._inbox.put_messages(values, self._messages(owners, starts, headers[:, 2], firsts))

    def flush(self) -> None:
        """Complete all of this rank's calls to `put` at the owners. One-sided."""
        self._inbox.flush()

    def header(self, origin: int, offset: int) -> list[int]:
        """Return the header at byte `offset` in the ring buffer for rank `origin`: array, start, numel, position."""
        at = self._header_start(origin, self.world.rank, offset)
        return self._memory[at : at + HEADER_BYTES].view(np.int64).tolist()

    def add(self, origin: int, headers: Sequence[Header]) -> None:
        """Add the received parts of gradients to the shards, in order. On return, their memory may be overwritten."""
        for index, start, numel, offset in headers:
            at = self._header_start(origin, self.world.rank, offset) + HEADER_BYTES
            values = self._memory[at : at + numel * self.dtype.itemsize]
            self._add(index, start, values.view(self._sums[index].dtype))

    def add_own_shard(self, index: int, start: int, values: torch.Tensor) -> None:
        """Add `values` to this rank's shard of array `index`, from element `start` on. They may then be reused."""
        self._add(index, start, values.numpy())

    def free(self) -> None:
        """Free the shards and all memory outside the inbox. Collective. Call this before freeing the inbox."""
        self.shards, self._sums = {}, {}
        del self._memory

    def _make_shards(self, numels: Mapping[int, int]) -> None:
        self.shards = {index: torch.zeros(numel, dtype=self.dtype) for index, numel in numels.items()}
        self._sums = {index: shard.numpy() for index, shard in self.shards.items()}

    def _put_headers(self, owners: np.ndarray, headers: np.ndarray) -> None:
        starts = self._header_start(self.world.rank, owners, headers[:, 3] % self.ring_bytes)
        sizes = np.full_like(owners, HEADER_BYTES)
        self._inbox.put_messages(headers, to_messages(owners, starts, sizes, np.cumsum(sizes) - HEADER_BYTES))

    def _messages(
        self, owners: np.ndarray, starts: np.ndarray, numels: np.ndarray, firsts: np.ndarray
    ) -> Iterator[Message]:
        return to_messages(owners, starts, numels * self.dtype.itemsize, firsts * self.dtype.itemsize)

    def _add(self, index: int, start: int, values: np.ndarray) -> None:
        # Not torch, which would start a thread pool for every thread that adds. inf - inf needs no warning here.
        shard = self._sums[index][start : start + values.size]
        with self._add_lock, np.errstate(all="ignore"):
            np.add(shard, values, out=shard)

    def _header_start(self, origin: Index, owner: Index, offset: Index) -> Index:
        return self._rings_start + ring_index(origin, owner) * self.host_ring_bytes(self.ring_bytes) + offset


def to_messages(owners: np.ndarray, starts: np.ndarray, sizes: np.ndarray, firsts: np.ndarray) -> Iterator[Message]:
    """Return one message per owner: start in the owner's window, size, and offset in the buffer, all in bytes."""
    return zip(owners.tolist(), starts.tolist(), zip(sizes.tolist(), firsts.tolist(), strict=True), strict=True)


def ring_index(origin: Index, owner: Index) -> Index:
    """Return the index of the ring buffer for rank `origin` in the inbox of `owner`, which has none for itself."""
    return origin - (origin > owner)

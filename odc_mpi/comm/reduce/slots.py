"""Where the shards and the slots of a mailbox are, and how what lies in slots is added: on the host.

A slot has a header and elements. Here both lie in the owner's inbox, one behind the other, each ring in one piece. On a
device (`comm.reduce.device_slots`) only the headers do. Who may put where, and when, is up to `comm.reduce.mailbox`.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from odc_mpi.comm.windows.rma import ALIGNMENT, Memory, Window
from odc_mpi.runtime.world import World

#: Of a header, half of a cache line: array, start, numel, position.
HEADER_BYTES = 32


class Header(NamedTuple):
    """What the header of a slot says: elements of an array's shard, from `start` on; and its place in its ring."""

    array: int
    start: int
    numel: int
    offset: int


class HostSlots:
    """Shards in private memory, slots in the inbox. Making one is local.

    Args:
        world: The ranks.
        dtype: Of the elements.

    Attributes:
        shards: This rank's, by their arrays' indices; once allocated.
    """

    #: Slots begin at multiples of so many bytes of a ring ...
    alignment = ALIGNMENT
    #: ... and their elements so many bytes later.
    values_offset = HEADER_BYTES
    #: Windows besides the inbox.
    num_windows = 0

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self.world = world
        self.dtype = dtype
        self.shards: dict[int, torch.Tensor] = {}
        self._sums: dict[int, np.ndarray] = {}
        # Not that of serving: who serves may have to wait for others, who adds never.
        self._add_lock = threading.Lock()

    def host_ring_bytes(self, ring_bytes: int) -> int:
        """Return the bytes that a ring takes of the inbox."""
        return ring_bytes

    def allocate(self, inbox: Window, rings_start: int, ring_bytes: int, numels: Mapping[int, int]) -> None:
        """Make shards and whatever slots need besides the inbox. Collective, once.

        Args:
            inbox: The window of which each ring has a part, one behind the other.
            rings_start: Where in it the first begins.
            ring_bytes: Of a ring.
            numels: Of the shards, by index.
        """
        self._inbox, self._rings_start = inbox, rings_start
        self._ring_bytes = self.host_ring_bytes(ring_bytes)
        self._memory = inbox.tensor.numpy()
        self._make_shards(numels)

    def values(self, gradient: torch.Tensor) -> Memory:
        """Return the memory of a gradient as MPI takes it."""
        return gradient.numpy()

    def put(self, owner: int, offset: int, header: np.ndarray, values: Memory) -> None:
        """Start to put a slot into this rank's ring at an owner. One-sided; `flush` completes it.

        Args:
            owner: The rank.
            offset: Where in the ring the slot begins, in bytes.
            header: `[32]` bytes; untouched until the flush.
            values: Of `dtype`, a part of what `values` returned; untouched until the flush.
        """
        assert isinstance(values, np.ndarray)
        at = self._header_start(self.world.rank, owner, offset)
        self._inbox.put(owner, at, header)
        self._inbox.put(owner, at + HEADER_BYTES, values.view(np.uint8))

    def flush(self, owner: int | None = None) -> None:
        """Wait until all puts are at an owner, or at all owners. One-sided."""
        self._inbox.flush(owner)

    def header(self, origin: int, offset: int) -> list[int]:
        """Return the numbers in the header of a slot that has arrived."""
        at = self._header_start(origin, self.world.rank, offset)
        return self._memory[at : at + HEADER_BYTES].view(np.int64).tolist()

    def add(self, origin: int, headers: Sequence[Header]) -> None:
        """Add slots that have arrived, one after the other; return when their room is free."""
        for index, start, numel, place in headers:
            at = self._header_start(origin, self.world.rank, place) + HEADER_BYTES
            values = self._memory[at : at + numel * self.dtype.itemsize]
            self._add(index, start, values.view(self._sums[index].dtype))

    def add_local(self, index: int, start: int, values: torch.Tensor) -> None:
        """Add the part of a gradient that this rank owns; return when it was."""
        self._add(index, start, values.numpy())

    def free(self) -> None:
        """Let go of all memory, before the inbox is freed. Collective."""
        self.shards, self._sums = {}, {}
        del self._memory

    def _make_shards(self, numels: Mapping[int, int]) -> None:
        self.shards = {index: torch.zeros(numel, dtype=self.dtype) for index, numel in numels.items()}
        self._sums = {index: shard.numpy() for index, shard in self.shards.items()}

    def _add(self, index: int, start: int, values: np.ndarray) -> None:
        # Not torch: its threads would come once more for every thread that serves. inf - inf is no news here.
        own = self._sums[index][start : start + values.size]
        with self._add_lock, np.errstate(all="ignore"):
            np.add(own, values, out=own)

    def _header_start(self, origin: int, owner: int, offset: int) -> int:
        return self._rings_start + ring_index(origin, owner) * self._ring_bytes + offset


def ring_index(origin: int, owner: int) -> int:
    """Return the number of a pusher's ring at an owner, which has none for itself."""
    return origin - (origin > owner)

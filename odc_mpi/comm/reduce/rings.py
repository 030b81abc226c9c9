"""Rings in the inboxes of owners, and the reservation of room in them.

A ring is memory of an owner that its senders fill in a cycle. The ranks of a node share one ring at each owner, so the
size of a ring depends on the number of nodes and not on the number of ranks. If all ranks are on one node, or if every
node has one rank, each rank has its own ring at each owner, and reservations need no lock. Otherwise, memory
that the node shares contains a lock, and the end of the reserved part of the node's ring at each owner.

Note: no deadlock
    A rank reserves only room that is already free, and then waits for its own Puts only. Each reserved slot is
    therefore received without further room, and the owner frees it.

Note: late senders
    If a rank is late between the reservation and the end of its Puts, the owner adds the slots of other ranks
    nevertheless, but room after the reserved slot is not reused. When the ring is full, its other senders wait, and
    their deadline names the late rank.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from odc_mpi.comm.windows.rma import ALIGNMENT, MAX_MESSAGE_NUMEL, Memory, SharedWindow, align_up
from odc_mpi.errors import UserError
from odc_mpi.runtime.deadline import wait_until
from odc_mpi.runtime.world import World

#: Minimum number of slots that fit into a ring, so that the owner can add one while an origin fills the next.
SLOTS_PER_RING = 4
#: Maximum number of slots from one origin that an owner has not yet added.
MAX_SLOTS = 128


@dataclass
class PendingPush:
    """Gradient with elements that are not yet in the rings.

    Attributes:
        values: Memory of `gradient`, from `HostSlots.values`.
        owners: Ranks to which the gradient is pushed, int64 `[n]`.
        starts: For each owner, index in its shard of the first element that is not yet in its ring.
        firsts: For each owner, index of the same element in the gradient.
        numels: For each owner, number of elements that are not yet in its ring.
    """

    name: str
    index: int
    gradient: torch.Tensor
    values: Memory
    owners: np.ndarray
    starts: np.ndarray
    firsts: np.ndarray
    numels: np.ndarray


class ReservedSlots(NamedTuple):
    """Slots for elements of a push, one in a ring of each owner.

    Attributes:
        header_numbers: Positions of the headers in the tables that the owners keep for this rank, int64 `[n]`.
        headers: Headers, int64 `[n, 4]`: array, first element in the owner's shard, numel, position in the ring.
        firsts: Index in `values` of the first element of each slot, int64 `[n]`.
    """

    values: Memory
    owners: np.ndarray
    header_numbers: np.ndarray
    headers: np.ndarray
    firsts: np.ndarray


class Rings:
    """Layout of the ring buffers through which ranks send gradients, of `itemsize` bytes each, to owners of shards.

    The inbox of each rank has a ring for every other rank, or, if the ranks of a node share rings, for every node.

    Attributes:
        count: Number of rings in the inbox of each rank.
        sharers: Other ranks that fill the same rings as this rank.
        num_bytes: Size in bytes of this rank's shared memory for reservations of slots; 0 if rings are not shared.
        ring_bytes: Size of a ring in bytes. Set by `plan`.
        num_headers: Number of headers that an owner keeps per origin. Set by `plan`.
        of_origin: For each rank, index of its ring in this rank's inbox. Set by `allocate`.
        origins: For each ring in this rank's inbox, the ranks that fill it. Set by `allocate`.
        at_owner: For each rank, index of this rank's ring in that rank's inbox, int64 `[size]`. Set by `allocate`.
    """

    def __init__(self, world: World, itemsize: int) -> None:
        self._world, self._itemsize = world, itemsize
        self._shared = world.size > world.num_nodes > 1
        self.count = world.num_nodes if self._shared else world.size - 1
        self.sharers = tuple(r for r in world.node_ranks if r != world.rank) if self._shared else ()
        self.num_bytes = torch.int64.itemsize * (1 + world.size) if self._shared else 0

    def plan(self, mailbox_bytes: int, numels: Collection[int]) -> None:
        """Divide `mailbox_bytes` among the rings. Raises `UserError` if it is too small.

        `numels` contains the number of elements in a rank's shard of each trainable array.
        """
        smallest = SLOTS_PER_RING * ALIGNMENT
        if mailbox_bytes < self.count * smallest:
            raise UserError(
                f"comm.mailbox_bytes must be at least {self.count * smallest} ({smallest} for each of {self.count} "
                f"rings), got {mailbox_bytes}"
            )
        # More room than for the gradients of two backward passes of each sender would not be used.
        num_senders = max(size for _, size in self._world.layout) if self._shared else 1
        useful = 2 * num_senders * sum(map(self.slot_bytes, numels))
        share = mailbox_bytes // max(1, self.count)
        self.ring_bytes = max(smallest, min(share, useful)) // smallest * smallest
        self._max_numel = min(self.ring_bytes // SLOTS_PER_RING, MAX_MESSAGE_NUMEL) // self._itemsize
        self.num_headers = min(MAX_SLOTS, self.ring_bytes // ALIGNMENT)

    def allocate(self) -> None:
        """Allocate the memory for reservations. Collective."""
        rank, size = self._world.rank, self._world.size
        # Number of slots for which this rank has reserved room at each owner.
        self.num_reserved = np.zeros(size, dtype=np.int64)
        # End of the slot whose header was the last at each position of this rank's table at each owner.
        self._header_ends = np.zeros((size, self.num_headers), dtype=np.int64)
        if not self._shared:
            # A rank has no ring in its own inbox.
            self.of_origin = [origin - (origin > rank) for origin in range(size)]
            self.at_owner = rank - (rank > np.arange(size))
            self._ends = np.zeros(size, dtype=np.int64)
        else:
            self.of_origin = self._world.gather_objects(self._world.node)
            self.at_owner = np.full(size, self._world.node)
            self._node = self._world.split("node")
            # The words of rank 0 of the node are used: the lock, which is 0 or 1 + the local rank of its holder, and
            # for each owner the position after the last reserved slot in the node's ring.
            self._words = SharedWindow(self._node, 1 + size, torch.int64)
            self._state = self._words.node_view(0, torch.int64, 1 + size).numpy()
            self._ends = self._state[1:]
        self.origins: list[list[int]] = [[] for _ in range(self.count)]
        for origin in range(size):
            if origin != rank:
                self.origins[self.of_origin[origin]].append(origin)

    def has_room(self, push: PendingPush, tails: np.ndarray) -> bool:
        """Return True if a push may find room. `tails`, int64 `[size]`, is the last tail received from each rank."""
        return self._next_slots(push, tails, np.zeros_like(tails, dtype=np.bool_)) is not None

    def reserve(self, push: PendingPush, tails: np.ndarray, waiting: np.ndarray) -> ReservedSlots | None:
        """Reserve a slot for a push's next elements in each ring that has room. Return None if no ring has room.

        Skips owners for which `waiting`, bool `[size]`, is True. The caller must hold the `lock`.
        """
        slots = self._next_slots(push, tails, waiting)
        if slots is None:
            return None
        chosen, owners, header_numbers, numels, positions, ends = slots
        self._ends[owners] = ends
        self._header_ends[owners, header_numbers] = ends
        self.num_reserved[owners] += 1
        headers = np.stack([np.full_like(owners, push.index), push.starts[chosen], numels, positions], axis=1)
        reserved = ReservedSlots(push.values, owners, header_numbers, headers, push.firsts[chosen])
        push.starts[chosen] += numels
        push.firsts[chosen] += numels
        push.numels[chosen] -= numels
        return reserved

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Context manager within which no other rank reserves room in the rings that this rank fills. One-sided."""
        if not self._shared:
            yield
            return
        world, words = self._world, self._words
        while holder := words.compare_and_swap(0, 0, 0, 1 + world.local_rank):
            what = "reserving room in mailboxes, which another rank of the node does"
            with world.deadline(what, [world.node_ranks[holder - 1]]):
                wait_until(lambda holder=holder: self._state[0] != holder, world.progress.poke)  # type: ignore[misc]
        words.sync()
        try:
            yield
        finally:
            words.sync()
            words.atomic_store(0, 0, 0)

    def slot_bytes(self, numel: Any) -> Any:
        """Return the size in bytes of a slot with `numel` elements. `numel` is an integer or an integer array."""
        return align_up(numel * self._itemsize)

    def free(self) -> None:
        """Free the memory. Collective."""
        del self._ends
        if self._shared:
            del self._state
            self._words.free()
            self._node.close()

    def _next_slots(self, push: PendingPush, tails: np.ndarray, waiting: np.ndarray) -> tuple[np.ndarray, ...] | None:
        if not push.numels.any():
            return None
        positions, tails = self._ends[push.owners], tails[push.owners]
        # A slot does not wrap around the end of the ring, where at least one element fits.
        fitting = (self.ring_bytes - positions % self.ring_bytes) // self._itemsize
        numels = np.minimum(np.minimum(push.numels, self._max_numel), fitting)
        ends = positions + self.slot_bytes(numels)
        header_numbers = self.num_reserved[push.owners] % self.num_headers
        has_room = (ends <= tails + self.ring_bytes) & (self._header_ends[push.owners, header_numbers] <= tails)
        chosen = np.flatnonzero(has_room & (push.numels > 0) & ~waiting[push.owners])
        if not chosen.size:
            return None
        return chosen, push.owners[chosen], header_numbers[chosen], numels[chosen], positions[chosen], ends[chosen]

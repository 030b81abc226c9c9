"""Gradient store for networks without a fast MPI_Accumulate. Owners add gradients that other ranks Put into rings.

Every rank has an inbox with one ring buffer for each other rank, which is the origin of the ring's content. A ring
contains slots of varying length, each of which is a header followed by gradient elements. An origin splits gradients
that are larger than a quarter of a ring.

Each ring has two 64-bit byte counters, which never decrease:

    head   in the owner's memory, written by the origin: slots before this position are complete
    tail   in the origin's memory, written by the owner: slots before this position were added and may be overwritten

    push            the origin Puts headers and elements into all rings with room, flushes, and Puts their `head`
    make_progress   the owner compares `head` with its previous value, adds the new slots, and Puts `tail`
    flush           the origin reads `head` back from every owner until it equals the value sent, because on some
                    networks, MPI_Win_flush does not ensure that `head` has arrived
    complete        the owner adds the last slots, as in `make_progress`; all heads arrived before the synchronization

Except in `flush`, each side polls only its own memory. An origin that waits for room adds the slots in its own inbox,
so two ranks that have filled each other's rings do not deadlock. Only the owner adds to its shard, so shards are in
private memory. A pass over the inbox adds slots in rank order, and those from the same rank in the order of the pushes.

Note: torn counters
    A value of `head` is sent only after all slots before it are complete. A reader may therefore use any value that
    does not exceed the value sent. In shared memory, an aligned 8-byte store is atomic. If a network writes a counter
    byte by byte in ascending order, a little-endian reader sees the low bytes of the new value with the high bytes of
    the old one. The result is at most the new value, and possibly less than the old one. Too small a `head` means no
    new slots yet, and too small a `tail` means less room. MPI guarantees atomicity only for MPI_Accumulate with
    MPI_REPLACE, on which the mailbox does not rely, because it is used where MPI_Accumulate is slow, waits for its
    target, or fails (measurements: benchmarks/notes/one-sidedness.md).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from odc_mpi.comm.layout import FlatLayout
from odc_mpi.comm.reduce.accumulate import MAX_PLANS, WindowGradientStore
from odc_mpi.comm.reduce.slots import Header, HostSlots, to_messages
from odc_mpi.comm.shard_storage import ranges_by_owner
from odc_mpi.comm.windows.rma import MAX_MESSAGE_NUMEL, Memory, Message, Window, align_up
from odc_mpi.comm.work import Work
from odc_mpi.errors import UserError
from odc_mpi.runtime.deadline import wait_until
from odc_mpi.runtime.world import World

#: Function that creates the shards and slots of a mailbox for a world and an element dtype.
SlotsFactory = Callable[[World, torch.dtype], HostSlots]

DEFAULT_MAILBOX_BYTES = 64 << 20
#: Minimum number of slots that fit into a ring, so that the owner can add one while the origin fills the next.
SLOTS_PER_RING = 4
COUNTER_BYTES = 8


class MailboxGradientStore(WindowGradientStore):
    """Gradient store that pushes gradients by MPI_Put into the memory of the owners, which add them to their shards.

    An owner adds received gradients when it calls `make_progress`, which is thread-safe, or `complete`. Only one thread
    at a time may call `push`, `flush`, or the `wait` method of the `Work` that `push` returns.

    Args:
        mailbox_bytes: Maximum memory in bytes for gradients that this rank has received but not yet added.
        slots: Function that creates the shards and the memory for received gradients, on the host or on a device.
    """

    def __init__(
        self,
        world: World,
        dtype: torch.dtype,
        mailbox_bytes: int = DEFAULT_MAILBOX_BYTES,
        slots: SlotsFactory = HostSlots,
    ) -> None:
        super().__init__(world, dtype)
        self._mailbox_bytes = mailbox_bytes
        self._slots = slots(world, dtype)
        # The inbox begins with the heads of all origins.
        self._counters_bytes = align_up(world.size * COUNTER_BYTES)
        self._plan_of = lru_cache(MAX_PLANS)(self._plan_push)
        # Pushes with elements that are not in the rings yet, oldest first.
        self._queue: deque[_PendingPush] = deque()
        # End of the slots written to this rank's ring in each owner's inbox.
        self._ends = np.zeros(world.size, dtype=np.int64)
        # Source of the last Put of each counter, not to be modified before the flush.
        self._outgoing_heads = np.zeros(world.size, dtype=np.int64)
        # Heads read back from the owners.
        self._confirmed = np.zeros(world.size, dtype=np.int64)
        self._consumed = np.zeros(world.size, dtype=np.int64)
        self._consumed_bytes = memoryview(self._consumed.view(np.uint8))  # type: ignore[arg-type]
        self._unflushed: list[int] = []
        self._drain_lock = threading.Lock()

    def plan(self, layouts: Sequence[FlatLayout]) -> int:
        """Return the size of the host windows in bytes. Raises `UserError` if `mailbox_bytes` is too small."""
        super().plan(layouts)
        num_rings = self.world.size - 1
        smallest = SLOTS_PER_RING * self._slots.alignment
        if self._mailbox_bytes < max(1, num_rings * smallest):
            raise UserError(
                f"comm.mailbox_bytes must be at least {max(1, num_rings * smallest)} ({smallest} for each of "
                f"{num_rings} other ranks), got {self._mailbox_bytes!r}"
            )
        # Room beyond the gradients of two backward passes would remain unused.
        useful = 2 * sum(self._slot_bytes(numel) for numel in self.trainable_numels.values())
        share = self._mailbox_bytes // max(1, num_rings)
        self._ring_bytes = max(smallest, min(share, useful)) // smallest * smallest
        largest_slot = min(self._ring_bytes // SLOTS_PER_RING, MAX_MESSAGE_NUMEL)
        self._max_numel = (largest_slot - self._slots.values_offset) // self.dtype.itemsize
        self._inbox_bytes = self._counters_bytes + num_rings * self._slots.host_ring_bytes(self._ring_bytes)
        return self._inbox_bytes + self._counters_bytes

    @override
    def allocate(self) -> None:
        # Two windows, so that the pushing thread and the adding thread never Put to or flush the same one.
        self._inbox = Window(self.world, self._inbox_bytes, torch.uint8)
        self._credit_window = Window(self.world, self._counters_bytes, torch.uint8)
        self._heads_bytes = memoryview(self._inbox.tensor.numpy()[: self._outgoing_heads.nbytes])  # type: ignore[arg-type]
        self._heads = self._inbox.tensor.numpy()[: self._outgoing_heads.nbytes].view(np.int64)
        self._credits = self._credit_window.tensor.numpy()[: self._outgoing_heads.nbytes].view(np.int64)
        self._slots.allocate(self._inbox, self._counters_bytes, self._ring_bytes, self.trainable_numels)
        self.world.progress.add(self.make_progress)

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._slots.shards[index]

    @override
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        assert gradient.dtype == self.dtype
        layout = self.layouts[index]
        plan = self._plan_of(layout.shard_numel, start, start + gradient.numel())
        push = _PendingPush(layout.name, index, gradient, self._slots.values(gradient), *plan.parts.copy())
        self._queue.append(push)
        with self.world.deadline(f"pushing the gradient of unit {layout.name}", plan.ranks):
            self._fill_rings()
            for begin, part in plan.own:
                self._slots.add_own_shard(index, begin, gradient[part])
        self.make_progress()
        return Work(partial(self._wait, push))

    @override
    def flush(self) -> None:
        while self._queue:
            self._wait(self._queue[-1])
        with self.world.deadline("flushing gradients"):
            self._slots.flush()
            self._confirm_heads()

    def make_progress(self) -> bool:
        """Add all received gradients to the shards and notify the senders of the freed memory. One-sided. Thread-safe.

        Returns False, after a few microseconds, if there is nothing to do or another thread is adding gradients.
        """
        self._inbox.sync()
        # Compared as bytes, which is cheapest. While a rank computes, a thread does this every other millisecond.
        if not self._unflushed and self._heads_bytes == self._consumed_bytes:
            return False
        if not self._drain_lock.acquire(blocking=False):  # another thread is adding right now
            return False
        try:
            self._drain()
        finally:
            self._drain_lock.release()
        return True

    @override
    def add_received(self) -> None:
        with self.world.deadline("adding the last gradients"), self._drain_lock:
            self._inbox.sync()
            self._drain()

    @override
    def complete(self) -> None:
        self.add_received()
        if not (self._heads == self._consumed).all():
            raise RuntimeError("a rank synchronized before its gradients had arrived")

    @override
    def free(self) -> None:
        self.world.progress.remove(self.make_progress)
        del self._heads, self._heads_bytes, self._credits
        self._slots.free()
        self._credit_window.free()
        self._inbox.free()

    def _wait(self, push: "_PendingPush") -> None:
        """Wait until a push is in the rings of its owners, adding received slots in the meantime. One-sided."""
        while push.numels.any():
            owner = int(push.owners[push.numels > 0][0])
            with self.world.deadline(f"waiting for room to push the gradient of unit {push.name}", [owner]):
                wait_until(self._fill_rings, self._notify_owners)

    def _notify_owners(self) -> None:
        # The owner must receive the heads before it can make room.
        self._slots.flush()
        self.world.progress.poke()

    def _fill_rings(self) -> bool:
        """Put queued elements into rings that have room, and return True if there were any. One-sided."""
        self._credit_window.sync()
        headers = []  # kept until the flush
        waiting = np.zeros(self.world.size, dtype=np.bool_)  # owners whose ring has no room for an earlier push
        for push in self._queue:
            while (added := self._put_slots(push, waiting)).size:
                headers.append(added)
            waiting[push.owners[push.numels > 0]] = True
        while self._queue and not self._queue[0].numels.any():
            self._queue.popleft()
        if not headers:
            return False
        # One flush for all slots, because it is a network round trip. It also completes the Puts of the previous heads.
        self._slots.flush()
        owners = np.flatnonzero(self._ends != self._outgoing_heads)
        self._outgoing_heads[owners] = self._ends[owners]
        self._inbox.put_messages(self._outgoing_heads, self._counters_of(owners))
        return True

    def _confirm_heads(self) -> None:
        """Wait until every owner's memory contains the head that was sent. One-sided. Call this after a flush."""
        while (late := np.flatnonzero(self._confirmed != self._outgoing_heads)).size:
            self._inbox.get_messages(self._confirmed, self._counters_of(late))
            self._inbox.flush()

    def _put_slots(self, push: "_PendingPush", waiting: np.ndarray) -> np.ndarray:
        """Start Putting the next slot of a push into each ring that has room, unless its owner is `waiting`. One-sided.

        Returns the slots' headers, which must be kept alive until the flush.
        """
        ends = self._ends[push.owners]
        # A slot does not wrap around the end of the ring. At least one element fits after a header.
        fitting = (self._ring_bytes - ends % self._ring_bytes - self._slots.values_offset) // self.dtype.itemsize
        numels = np.minimum(np.minimum(push.numels, self._max_numel), fitting)
        new_ends = ends + self._slot_bytes(numels)
        has_room = new_ends <= self._credits[push.owners] + self._ring_bytes
        chosen = has_room & (push.numels > 0) & ~waiting[push.owners]
        if not chosen.any():
            return np.empty(0)
        owners = push.owners[chosen]
        headers = np.stack([np.full_like(ends, push.index), push.starts, numels, ends], axis=1)[chosen]
        self._slots.put(owners, headers, push.values, push.firsts[chosen])
        self._ends[owners] = new_ends[chosen]
        numels[~chosen] = 0
        push.starts += numels
        push.firsts += numels
        push.numels -= numels
        return headers

    def _counters_of(self, ranks: np.ndarray) -> Iterator[Message]:
        """Return messages between this rank's counter at each of `ranks` and a local array of counters by rank."""
        starts, sizes = (np.full_like(ranks, number) for number in (self.world.rank * COUNTER_BYTES, COUNTER_BYTES))
        return to_messages(ranks, starts, sizes, ranks * COUNTER_BYTES)

    def _drain(self) -> None:
        """Add all received slots in rank order. The caller must hold `_drain_lock`. One-sided."""
        what = "releasing room in the mailbox"
        with self.world.deadline(what, self._unflushed):
            # Usually complete by now. A counter may be Put again only after this.
            if self._unflushed:
                self._credit_window.flush()
                self._unflushed.clear()
        origins = np.flatnonzero(self._heads > self._consumed).tolist()
        with self.world.deadline(what, origins):
            for origin in origins:
                headers, end = self._headers(origin, int(self._consumed[origin]), int(self._heads[origin]))
                self._slots.add(origin, headers)
                self._consumed[origin] = end
                self._inbox.sync()  # no load of a slot may move past the Put that lets the origin overwrite it
                self._credit_window.put_messages(self._consumed, self._counters_of(np.array([origin])))
                self._unflushed.append(origin)

    def _headers(self, origin: int, tail: int, head: int) -> tuple[list[Header], int]:
        """Return the headers of an origin's slots from byte `tail` on, and the position after the last slot."""
        self._inbox.sync()  # no load of a slot may move ahead of the load of the counter
        headers = []
        # The last slot may end after `head`, which may be a torn read.
        while tail < head:
            offset = tail % self._ring_bytes
            array, start, numel, position = self._slots.header(origin, offset)
            if position != tail:
                raise RuntimeError(f"slot of rank {origin}: expected position {tail}, got {position}")
            headers.append(Header(array, start, numel, offset))
            tail += self._slot_bytes(numel)
        return headers, tail

    def _slot_bytes(self, numel: Any) -> Any:
        """Return the size in bytes of a slot with `numel` elements, or of several slots if `numel` is an array."""
        return align_up(self._slots.values_offset + numel * self.dtype.itemsize, self._slots.alignment)

    def _plan_push(self, shard_numel: int, start: int, stop: int) -> "_PushPlan":
        rank = self.world.rank
        ranges = tuple(ranges_by_owner(shard_numel, rank, start, stop))
        own = [(begin - rank * shard_numel, slice(begin - start, end - start)) for r, begin, end in ranges if r == rank]
        others = [(r, begin - r * shard_numel, begin - start, end - begin) for r, begin, end in ranges if r != rank]
        return _PushPlan(tuple(r for r, *_ in others), np.array(others, dtype=np.int64).reshape(-1, 4).T, own)


class _PushPlan(NamedTuple):
    """Division of a pushed range of elements among its owners.

    Attributes:
        ranks: Owners of the range other than this rank.
        parts: Initial `owners`, `starts`, `firsts` and `numels` of a `_PendingPush`, int64 `[4, n]`.
        own: Start in this rank's shard and the part of the range that this rank owns. Empty if it owns none.
    """

    ranks: tuple[int, ...]
    parts: np.ndarray
    own: list[tuple[int, slice]]


@dataclass
class _PendingPush:
    """Gradient that is being pushed. The store references it until all its elements are in the owners' rings.

    Attributes:
        values: Memory of `gradient`, in a form that can be passed to MPI.
        owners: Ranks to which the gradient is pushed, int64 `[n]`.
        starts: For each owner, the index in its shard of the first element that is not yet in its ring.
        firsts: For each owner, the index of the same element in the gradient.
    """

    name: str
    index: int
    gradient: torch.Tensor
    values: Memory
    owners: np.ndarray
    starts: np.ndarray
    firsts: np.ndarray
    numels: np.ndarray

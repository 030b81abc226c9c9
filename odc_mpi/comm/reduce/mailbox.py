"""Gradient store for networks without fast MPI_Accumulate. Owners add gradients that other ranks Put into rings.

Every rank has an inbox with ring buffers, one for each node or one for each other rank (`comm.reduce.rings`). A ring
contains slots of varying length: gradient elements from one rank, the origin. An origin splits gradients larger than a
quarter of a ring. The headers of slots are in the inbox as well: for each origin a table with those of its last slots.

Two 64-bit counters never decrease:

    head   in the owner's memory, written by the origin: number of slots of the origin that are complete
    tail   in the origins' memory, written by the owner: slots before this position of a ring were added and may be
           overwritten, and so may their headers

    push            the origin reserves room in all rings that have room, Puts headers and elements, flushes, and Puts
                    each `head`
    make_progress   the owner compares each `head` with its previous value, adds the new slots, and Puts `tail`
    flush           the origin reads `head` back from every owner until it equals the value sent, since MPI_Win_flush
                    does not ensure on all networks that `head` has arrived
    complete        the owner adds the last slots, as in `make_progress`; all heads arrived before the synchronization

Except in `flush`, each side polls only its own memory. An origin that waits for room adds the slots in its own inbox,
so two ranks with full rings for each other do not deadlock. One pass over the inbox adds slots in the order of rings
and ranks, and slots of the same rank in the order of pushes.

Note: torn counters
    All slots before a value of `head` are complete before this value is sent. A reader may therefore use any value that
    is not larger than the value sent. In shared memory an aligned 8-byte store is atomic. If a network writes a counter
    byte by byte in ascending order, a little-endian reader sees the low bytes of the new value with the high bytes of
    the old value. The result is at most the new value, possibly less than the old value. A small `head` means no new
    slots yet; a small `tail` means less room. MPI guarantees atomicity only for MPI_Accumulate with MPI_REPLACE, which
    the counters do not use, because the mailbox is for systems where MPI_Accumulate is slow, waits for its target, or
    fails (measurements: benchmarks/notes/one-sidedness.md).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import groupby

import numpy as np
import torch
from typing_extensions import override

from odc_mpi.comm.layout import FlatLayout, ranges_by_owner
from odc_mpi.comm.reduce.accumulate import MAX_PLANS, WindowGradientStore
from odc_mpi.comm.reduce.rings import SLOTS_PER_RING, PendingPush, ReservedSlots, Rings
from odc_mpi.comm.reduce.slots import HostSlots, Slot, to_messages
from odc_mpi.comm.settings import CommConfig
from odc_mpi.comm.windows.rma import Message, Window, align_up
from odc_mpi.comm.work import Work
from odc_mpi.runtime.deadline import wait_until
from odc_mpi.runtime.world import World

#: Size of a header: four int64 (array, start, numel, position of the slot in its ring).
HEADER_BYTES = 32
COUNTER_BYTES = 8


class MailboxGradientStore(WindowGradientStore):
    """Gradient store that pushes gradients into slots of the owners' rings, from which owners add them to their shards.

    Only one thread at a time may call `push`, `flush`, or the `wait` method of the `Work` that `push` returns.

    Args:
        comm: Settings, of which `mailbox_bytes` is the maximum memory for gradients that this rank has received but not
            yet added. In addition, headers take up to 4 KiB for each other rank.
        slots: Constructor of the shards and slots, called with `world` and `dtype`.
    """

    def __init__(
        self,
        world: World,
        dtype: torch.dtype,
        comm: CommConfig,
        slots: Callable[[World, torch.dtype], HostSlots] = HostSlots,
    ) -> None:
        super().__init__(world, dtype)
        self._mailbox_bytes = comm.mailbox_bytes
        self._slots = slots(world, dtype)
        self._rings = Rings(world, dtype.itemsize)
        self._counters_bytes = align_up(world.size * COUNTER_BYTES)
        self._plan_of = lru_cache(MAX_PLANS)(self._plan_push)
        # Pushes with elements that are not in the rings yet, the oldest first.
        self._queue: deque[PendingPush] = deque()
        # Source of the last Put of each counter: not modified before the flush.
        self._outgoing_heads = np.zeros(world.size, dtype=np.int64)
        # Heads that were read back from the owners.
        self._confirmed = np.zeros(world.size, dtype=np.int64)
        self._consumed = np.zeros(world.size, dtype=np.int64)
        self._outgoing_tails = np.zeros(self._rings.count, dtype=np.int64)
        self._tails = [0] * self._rings.count
        # For each ring, number of slots between the outgoing tail and the tail.
        self._num_withheld = [0] * self._rings.count
        # For each ring, the slots after its tail that were added: their end by their position.
        self._added: list[dict[int, int]] = [{} for _ in self._tails]
        self._consumed_bytes = memoryview(self._consumed.view(np.uint8))  # type: ignore[arg-type]
        self._unflushed: list[int] = []
        self._drain_lock = threading.Lock()

    @override
    def plan(self, layouts: Sequence[FlatLayout]) -> int:
        super().plan(layouts)
        self._rings.plan(self._mailbox_bytes, self.trainable_numels.values())
        # The inbox begins with the heads of all origins, and the headers of their slots.
        self._table_bytes = self._rings.num_headers * HEADER_BYTES
        self._rings_start = self._counters_bytes + align_up(self.world.size * self._table_bytes)
        self._rings_bytes = self._rings.count * self._rings.ring_bytes
        self._inbox_bytes = self._rings_start + self._slots.in_inbox * self._rings_bytes
        return self._inbox_bytes + self._counters_bytes + self._rings.num_bytes

    @override
    def allocate(self) -> None:
        # Two windows, so that the thread that pushes and the thread that adds never Put to or flush the same one.
        self._inbox = Window(self.world, self._inbox_bytes, torch.uint8)
        self._credit_window = Window(self.world, self._counters_bytes, torch.uint8)
        self._heads_bytes = memoryview(self._inbox.tensor.numpy()[: self._outgoing_heads.nbytes])  # type: ignore[arg-type]
        self._heads = self._inbox.tensor.numpy()[: self._outgoing_heads.nbytes].view(np.int64)
        self._credits = self._credit_window.tensor.numpy()[: self._outgoing_heads.nbytes].view(np.int64)
        headers = self._inbox.tensor.numpy()[self._counters_bytes :][: self.world.size * self._table_bytes]
        self._headers = headers.view(np.int64).reshape(self.world.size, self._rings.num_headers, -1)
        self._rings.allocate()
        self._slots.allocate(self._inbox, self._rings_start, self._rings_bytes, self.trainable_numels)
        self.world.progress.add(self.make_progress)

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._slots.shards[index]

    @override
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        assert gradient.dtype == self.dtype
        layout = self.layouts[index]
        self.traffic.add(layout, self.dtype.itemsize, start, start + gradient.numel())
        owners, remote_ranges, local_ranges = self._plan_of(layout.shard_numel, start, start + gradient.numel())
        push = PendingPush(layout.name, index, gradient, self._slots.values(gradient), *remote_ranges.copy())
        self._queue.append(push)
        with self.world.deadline(f"pushing the gradient of unit {layout.name}", owners):
            self._fill_rings()
            for begin, part in local_ranges:
                self._slots.add_own_shard(index, begin, gradient[part])
        self.make_progress()
        return Work(partial(self._wait, push))

    @override
    def flush(self) -> None:
        while self._queue:
            self._wait(self._queue[-1])
        with self.world.deadline("flushing gradients"):
            self._flush_puts()
            self._confirm_heads()

    def make_progress(self) -> bool:
        """Add all received slots to the shards, and Put the new tails. One-sided. Thread-safe.

        Returns False, after a few microseconds, if there is nothing to do or if another thread is adding slots.
        """
        self._inbox.sync()
        # Compared as bytes, which is cheapest: while a rank computes, a thread does this every other millisecond.
        if not self._unflushed and self._heads_bytes == self._consumed_bytes:
            return False
        if not self._drain_lock.acquire(blocking=False):  # another thread adds at this moment
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
        del self._heads, self._heads_bytes, self._headers, self._credits
        self._slots.free()
        self._rings.free()
        self._credit_window.free()
        self._inbox.free()

    def _wait(self, push: PendingPush) -> None:
        """Wait until a push is in the rings of its owners. One-sided."""
        while push.numels.any():
            owner = int(push.owners[push.numels > 0][0])
            what = f"waiting for room to push the gradient of unit {push.name}"
            with self.world.deadline(what, [owner, *self._rings.sharers]):
                wait_until(lambda: self._has_room() and self._fill_rings(), self._notify_owners)

    def _notify_owners(self) -> None:
        # The owner must receive the heads before it can make room.
        self._flush_puts()
        self.world.progress.poke()

    def _flush_puts(self) -> None:
        self._slots.flush()
        self._inbox.flush()

    def _has_room(self) -> bool:
        """Return True if a queued push may find room. Does not communicate, in contrast to `_fill_rings`."""
        self._credit_window.sync()
        return any(self._rings.has_room(push, self._credits) for push in self._queue)

    def _fill_rings(self) -> bool:
        """Put queued elements into rings that have room. Return True if any elements were put. One-sided."""
        self._credit_window.sync()
        waiting = np.zeros(self.world.size, dtype=np.bool_)  # owners whose ring has no room for an earlier push
        reserved = []  # the headers are kept until the flush
        with self._rings.lock():
            for push in self._queue:
                while slots := self._rings.reserve(push, self._credits, waiting):
                    reserved.append(slots)
                waiting[push.owners[push.numels > 0]] = True
        for slots in reserved:
            self._put(slots)
        while self._queue and not self._queue[0].numels.any():
            self._queue.popleft()
        if not reserved:
            return False
        # A round trip over a network, so one for all slots. It also completes the Puts of the previous heads.
        self._flush_puts()
        num_reserved = self._rings.num_reserved
        owners = np.flatnonzero(num_reserved != self._outgoing_heads)
        self._outgoing_heads[owners] = num_reserved[owners]
        self._inbox.put_messages(self._outgoing_heads, self._counters_of(owners))
        return True

    def _confirm_heads(self) -> None:
        while (late := np.flatnonzero(self._confirmed != self._outgoing_heads)).size:
            self._inbox.get_messages(self._confirmed, self._counters_of(late))
            self._inbox.flush()

    def _put(self, slots: ReservedSlots) -> None:
        values, owners, header_numbers, headers, firsts = slots
        starts = self._counters_bytes + self.world.rank * self._table_bytes + header_numbers * HEADER_BYTES
        sizes = np.full_like(owners, HEADER_BYTES)
        self._inbox.put_messages(headers, to_messages(owners, starts, sizes, np.cumsum(sizes) - HEADER_BYTES))
        _, _, numels, positions = headers.T
        offsets = self._rings.at_owner[owners] * self._rings.ring_bytes + positions % self._rings.ring_bytes
        self._slots.put(owners, offsets, values, numels, firsts)

    def _counters_of(self, ranks: np.ndarray) -> Iterator[Message]:
        """Return messages between this rank's counter at each of `ranks` and a local array of counters by rank."""
        start = self.world.rank * COUNTER_BYTES
        return ((rank, start, (COUNTER_BYTES, rank * COUNTER_BYTES)) for rank in ranks.tolist())

    def _drain(self) -> None:
        """Add all received slots, in the order of rings and ranks. The caller holds `_drain_lock`."""
        what = "releasing room in the mailbox"
        with self.world.deadline(what, self._unflushed):
            # Usually complete since the last call. A counter may be Put again only after this.
            if self._unflushed:
                self._credit_window.flush()
                self._unflushed.clear()
        heads = self._heads.copy()
        self._inbox.sync()  # no load of a header or slot may move before the load of the counters
        origins, ring_of = np.flatnonzero(heads > self._consumed).tolist(), self._rings.of_origin.__getitem__
        with self.world.deadline(what, origins):
            for ring, senders in groupby(sorted(origins, key=ring_of), ring_of):
                for origin in senders:
                    self._slots.add(self._received(ring, origin, int(heads[origin])))
                    self._consumed[origin] = heads[origin]
                self._release_room(ring)

    def _received(self, ring: int, origin: int, head: int) -> list[Slot]:
        """Return the slots of an origin that were received but not yet added, and record their ends in `_added`."""
        slots = []
        tail = self._tails[ring]
        for number in range(self._consumed[origin], head):
            array, start, numel, position = self._headers[origin, number % self._rings.num_headers].tolist()
            if numel < 1 or not tail <= position < tail + self._rings.ring_bytes:
                raise RuntimeError(
                    f"slot {number} of rank {origin}: expected elements at a position from {tail} to "
                    f"{tail + self._rings.ring_bytes}, got {numel} at {position}"
                )
            slots.append(Slot(array, start, numel, ring * self._rings.ring_bytes + position % self._rings.ring_bytes))
            self._added[ring][position] = position + self._rings.slot_bytes(numel)
        return slots

    def _release_room(self, ring: int) -> None:
        """Advance the tail of a ring past added slots, and Put it to the senders if it has moved far enough."""
        added, tail = self._added[ring], self._tails[ring]
        while (end := added.pop(tail, None)) is not None:
            tail = end
            self._num_withheld[ring] += 1
        self._tails[ring] = tail
        # A Put for each slot would take much of the time of small pushes. In a ring without received slots, a sender
        # has room for a slot of any size, and a header, even if a part less than the largest slot is withheld.
        largest_slot, num_slots = (size // SLOTS_PER_RING for size in (self._rings.ring_bytes, self._rings.num_headers))
        if tail - self._outgoing_tails[ring] >= largest_slot or self._num_withheld[ring] >= num_slots:
            self._outgoing_tails[ring] = tail
            self._num_withheld[ring] = 0
            self._inbox.sync()  # no load of a slot may move after the Put that allows origins to overwrite it
            origins = self._rings.origins[ring]
            start, span = self.world.rank * COUNTER_BYTES, (COUNTER_BYTES, ring * COUNTER_BYTES)
            self._credit_window.put_messages(self._outgoing_tails, ((origin, start, span) for origin in origins))
            self._unflushed.extend(origins)

    def _plan_push(
        self, shard_numel: int, start: int, stop: int
    ) -> tuple[tuple[int, ...], np.ndarray, list[tuple[int, slice]]]:
        """Return the parts of a pushed range `[start, stop)` of elements.

        Returns:
            The other ranks that own a part; initial `owners`, `starts`, `firsts` and `numels` of a `PendingPush`, int64
            `[4, n]`; and `(start in this rank's shard, slice of the range)` if this rank owns a part, otherwise empty.
        """
        rank = self.world.rank
        ranges = tuple(ranges_by_owner(shard_numel, rank, start, stop))
        local_ranges = [
            (begin - rank * shard_numel, slice(begin - start, end - start)) for r, begin, end in ranges if r == rank
        ]
        others = [(r, begin - r * shard_numel, begin - start, end - begin) for r, begin, end in ranges if r != rank]
        return tuple(r for r, *_ in others), np.array(others, dtype=np.int64).reshape(-1, 4).T, local_ranges

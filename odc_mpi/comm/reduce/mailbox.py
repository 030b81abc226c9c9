"""Gradients are put into slots of their owner, and the owner adds them: for networks without a fast MPI_Accumulate.

Every rank hosts an inbox: for each other rank, its pusher, a ring of bytes with one slot behind the other. A slot is a
header and the elements of a piece of a gradient, as long as they are; a piece that is longer than a quarter of the
ring is cut. Two counters belong to a ring, both of bytes since the beginning, which only grow:

    sent      in the owner's memory, put there by the pusher: slots up to here are complete
    done      in the pusher's memory, put there by the owner: slots up to here have been added, their room is free

    push      where there is room: Put of header and elements, Flush, then Put of `sent`
    serve     the owner compares `sent` with what it has taken, adds the slots in between, and Puts `done`
    flush     every owner's memory shows the last `sent`: read back, since not every network's Flush says so much
    complete  serve once more: all counters had arrived before the ranks met at A

Each side looks at its own memory only. A pusher without room waits and serves its own inbox meanwhile: so two that wait
for each other both get on. Nobody else adds to a shard, so shards are private memory. One pass over the inbox adds in
the order of ranks, and each rank's slots in the order in which they were pushed.

Why a counter may be read at any time: everything below the new value was complete before the value was sent, so any
value up to it is safe. On shared memory eight aligned bytes are stored at once. A network that wrote them one by one
would show the lower bytes of the new value below the upper ones of the old, on a little-endian machine: at most the new
value, at times less than the old one. A `sent` like that is no news, a `done` like that is less room. MPI itself
promises eight bytes at once for Accumulate(MPI_REPLACE) alone; but a mailbox is chosen where Accumulate waits for its
target, is slow, or gives no answer, so it has to do without (benchmarks/notes/one-sidedness.md has the figures).
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from typing_extensions import override

from odc_mpi.comm.reduce.accumulate import WindowGradientStore
from odc_mpi.comm.reduce.slots import Header, HostSlots
from odc_mpi.comm.shard_storage import Footprint, Layout
from odc_mpi.comm.windows.rma import Memory, Window, align_up
from odc_mpi.comm.work import DeferredWork, Work
from odc_mpi.errors import UserError
from odc_mpi.runtime.deadline import wait_until
from odc_mpi.runtime.world import World

#: Makes what knows where the shards and the slots of a mailbox are, for elements of a type.
SlotsFactory = Callable[[World, torch.dtype], HostSlots]

DEFAULT_MAILBOX_BYTES = 64 << 20
#: A slot is at most a ring divided by this: so its owner adds one while its pusher fills the next.
SLOTS_PER_RING = 4
COUNTER_BYTES = 8


class MailboxGradientStore(WindowGradientStore):
    """MPI_Put into slots of the owners, who add them. Owners take part, whenever they or a thread of theirs serve.

    `push`, its wait and `flush` may be called from one thread at a time, `serve` from any.

    Args:
        world: The ranks.
        dtype: In which gradients travel and are summed.
        mailbox_bytes: At most so much memory holds what other ranks have pushed to this one and it has not added yet.
        slots: Makes what knows where shards and slots are: on the host, or on a device (`comm.reduce.device_slots`).
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
        # The counters of all pushers come first in an inbox.
        self._counters_bytes = align_up(world.size * COUNTER_BYTES)
        # In the order of `ranges_by_owner`.
        others = (*range(world.rank + 1, world.size), *range(world.rank))
        self._rings = {owner: _Ring(owner) for owner in others}
        # What the last Put of a counter carried: untouched until that is flushed.
        self._outgoing_heads = np.zeros(world.size, dtype=np.int64)
        # What was read back of it.
        self._confirmed = np.zeros(world.size, dtype=np.int64)
        self._consumed = np.zeros(world.size, dtype=np.int64)
        self._consumed_bytes = memoryview(self._consumed.view(np.uint8))  # type: ignore[arg-type]
        self._unflushed: list[int] = []
        self._serving = threading.Lock()

    def plan(self, layouts: Sequence[Layout]) -> Footprint:
        """Divide the memory among the other ranks.

        Raises:
            UserError: `mailbox_bytes` is too little for one element of each peer.
        """
        super().plan(layouts)
        num_rings = self.world.size - 1
        smallest = SLOTS_PER_RING * self._slots.alignment
        if self._mailbox_bytes < max(1, num_rings * smallest):
            raise UserError(
                f"comm.mailbox_bytes must be at least {max(1, num_rings * smallest)} ({smallest} for each of "
                f"{num_rings} other ranks), got {self._mailbox_bytes!r}"
            )
        # More than two backward passes put into it would only take room from others.
        useful = 2 * sum(self._slot_bytes(numel) for numel in self.trainable_numels.values())
        share = self._mailbox_bytes // max(1, num_rings)
        self._ring_bytes = max(smallest, min(share, useful)) // smallest * smallest
        self._max_numel = (self._ring_bytes // SLOTS_PER_RING - self._slots.values_offset) // self.dtype.itemsize
        self._inbox_bytes = self._counters_bytes + num_rings * self._slots.host_ring_bytes(self._ring_bytes)
        return Footprint(2 + self._slots.num_windows, self._inbox_bytes + self._counters_bytes)

    @override
    def allocate(self) -> None:
        # Two, so that no two threads ever put into or flush the same: the one that pushes, and the one that serves.
        self._inbox = Window(self.world, self._inbox_bytes, torch.uint8)
        self._credit_window = Window(self.world, self._counters_bytes, torch.uint8)
        self._heads_offset = memoryview(self._inbox.tensor.numpy()[: self._outgoing_heads.nbytes])  # type: ignore[arg-type]
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
        push = _PendingPush(self.layouts[index].name, gradient)
        whole, own = self._slots.values(gradient), []
        for owner, begin, part in self.split_by_owner(index, start, start + gradient.numel()):
            if owner == self.world.rank:
                own.append((begin, part))
            else:
                values = whole[part]
                push.numel += len(values)
                self._rings[owner].queue.append(_PendingPut(push, index, begin, values))
        owners = [ring.owner for ring in self._rings.values() if ring.queue]
        with self.world.deadline(f"pushing the gradient of unit {push.name}", owners):
            self._put_what_fits()
            for begin, part in own:
                self._slots.add_local(index, begin, gradient[part])
        self.make_progress()
        return DeferredWork(partial(self._wait, push))

    @override
    def flush(self) -> None:
        for ring in self._rings.values():
            while ring.queue:
                self._wait(ring.queue[-1].push)
        with self.world.deadline("flushing gradients"):
            self._slots.flush()
            self._confirm_heads()

    def make_progress(self) -> bool:
        """Add what has arrived and hand its room back; a few microseconds if nothing has. Local, from any thread."""
        self._inbox.sync()
        # As bytes: a look every other millisecond, beside a rank that computes, is to cost as little as it can.
        if not self._unflushed and self._heads_offset == self._consumed_bytes:
            return False
        if not self._serving.acquire(blocking=False):  # another thread is at it
            return False
        try:
            self._drain()
        finally:
            self._serving.release()
        return True

    @override
    def complete(self) -> None:
        with self.world.deadline("adding the last gradients"), self._serving:
            self._inbox.sync()
            self._drain()
        assert (self._heads == self._consumed).all(), "a rank came to A before its gradients had arrived"

    @override
    def free(self) -> None:
        self.world.progress.remove(self.make_progress)
        del self._heads, self._heads_offset, self._credits
        self._slots.free()
        self._credit_window.free()
        self._inbox.free()

    def _wait(self, push: "_PendingPush") -> None:
        """Wait until a push is in its owners' rings, serving meanwhile. One-sided; full rings wait for their owners."""
        while push.numel:
            owner = next(ring.owner for ring in self._rings.values() if any(p.push is push for p in ring.queue))
            with self.world.deadline(f"waiting for room to push the gradient of unit {push.name}", [owner]):
                wait_until(self._put_what_fits, self._poke_local_owners)

    def _poke_local_owners(self) -> None:
        # The owner must hear of what is there before it can make room.
        self._slots.flush()
        self.world.progress.poke()

    def _put_what_fits(self) -> bool:
        """Put pieces into their owners' rings as far as there is room; return whether any was."""
        self._credit_window.sync()
        filled = [(ring, headers) for ring in self._rings.values() if (headers := self._fill(ring))]
        for ring, _ in filled:
            # A round trip over a network, so one for all slots. It also lets go of the counter of the time before.
            self._slots.flush(ring.owner)
            self._outgoing_heads[ring.owner] = ring.head
            self._inbox.put(ring.owner, self.world.rank * COUNTER_BYTES, _counter(self._outgoing_heads, ring.owner))
        return bool(filled)

    def _confirm_heads(self) -> None:
        """Wait until every owner's memory shows the counter that was sent to it. After a flush."""
        late = np.flatnonzero(self._confirmed != self._outgoing_heads).tolist()
        while late:
            for owner in late:
                self._inbox.get(owner, _counter(self._confirmed, owner), self.world.rank * COUNTER_BYTES)
            self._inbox.flush()
            late = [owner for owner in late if self._confirmed[owner] != self._outgoing_heads[owner]]

    def _fill(self, ring: "_Ring") -> list[np.ndarray]:
        """Start to put pieces into a ring; return their headers, which are to be kept until the flush."""
        end = int(self._credits[ring.owner]) + self._ring_bytes
        headers = []
        while ring.queue:
            piece, place = ring.queue[0], ring.head % self._ring_bytes
            # Nor does a slot go round the end of the ring. At least one element fits behind a header.
            fitting = (self._ring_bytes - place - self._slots.values_offset) // self.dtype.itemsize
            values = piece.values[: min(self._max_numel, fitting)]
            num_bytes = self._slot_bytes(len(values))
            if ring.head + num_bytes > end:
                break
            header = np.array([piece.index, piece.start, len(values), ring.head], dtype=np.int64)
            self._slots.put(ring.owner, place, header.view(np.uint8), values)
            headers.append(header)
            ring.head += num_bytes
            piece.push.numel -= len(values)
            piece.start, piece.values = piece.start + len(values), piece.values[len(values) :]
            if not len(piece.values):
                ring.queue.popleft()
        return headers

    def _drain(self) -> None:
        """Add what has arrived, in the order of ranks. Only by who holds `_serving`."""
        what = "handing room in the mailbox back"
        with self.world.deadline(what, self._unflushed):
            # Complete since the last time, as a rule. Only then may a counter be put again.
            for pusher in self._unflushed:
                self._credit_window.flush(pusher)
            self._unflushed.clear()
        pushers = np.flatnonzero(self._heads > self._consumed).tolist()
        with self.world.deadline(what, pushers):
            for pusher in pushers:
                headers, end = self._headers(pusher, int(self._consumed[pusher]), int(self._heads[pusher]))
                self._slots.add(pusher, headers)
                self._consumed[pusher] = end
                self._inbox.sync()  # nor may one come after the Put that lets the pusher overwrite the slot
                self._credit_window.put(pusher, self.world.rank * COUNTER_BYTES, _counter(self._consumed, pusher))
                self._unflushed.append(pusher)

    def _headers(self, origin: int, tail: int, head: int) -> tuple[list[Header], int]:
        """Return the headers of one pusher's slots, from `taken` on, and the end of the last slot."""
        self._inbox.sync()  # no load of a slot may come before that of the counter
        headers = []
        # The last one may end behind `sent`, whose bytes may not have come all at once.
        while tail < head:
            place = tail % self._ring_bytes
            array, start, numel, position = self._slots.header(origin, place)
            assert position == tail, f"rank {origin}'s slot {tail} says that it is {position}"
            headers.append(Header(array, start, numel, place))
            tail += self._slot_bytes(numel)
        return headers, tail

    def _slot_bytes(self, numel: int) -> int:
        return align_up(self._slots.values_offset + numel * self.dtype.itemsize, self._slots.alignment)


@dataclass
class _PendingPush:
    """A gradient of which `numel` elements are not in their owners' rings yet; it is kept until then."""

    name: str
    gradient: torch.Tensor
    numel: int = 0


@dataclass
class _PendingPut:
    """Elements for one owner, from `start` of its shard on, that are not in its ring yet."""

    push: _PendingPush
    index: int
    start: int
    values: Memory


@dataclass
class _Ring:
    """This rank's ring in an owner's inbox: bytes put since the beginning, and what is to come."""

    owner: int
    head: int = 0
    queue: deque[_PendingPut] = field(default_factory=deque)


def _counter(counters: np.ndarray, rank: int) -> np.ndarray:
    return counters[rank : rank + 1].view(np.uint8)

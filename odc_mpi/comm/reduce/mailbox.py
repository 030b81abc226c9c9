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

from odc_mpi.comm.host import Footprint, Layout
from odc_mpi.comm.pending import Later, Pending
from odc_mpi.comm.reduce.accumulate import Reduction
from odc_mpi.comm.reduce.slots import Header, HostSlots
from odc_mpi.comm.windows.rma import Memory, Window, aligned
from odc_mpi.errors import UserError
from odc_mpi.runtime.deadline import wait_until
from odc_mpi.runtime.world import World

#: Makes what knows where the shards and the slots of a mailbox are, for elements of a type.
MakeSlots = Callable[[World, torch.dtype], HostSlots]

DEFAULT_MAILBOX_BYTES = 64 << 20
#: A slot is at most a ring divided by this: so its owner adds one while its pusher fills the next.
SLOTS_PER_RING = 4
COUNTER_BYTES = 8


class MailboxReduction(Reduction):
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
        slots: MakeSlots = HostSlots,
    ) -> None:
        super().__init__(world, dtype)
        self._mailbox_bytes = mailbox_bytes
        self._slots = slots(world, dtype)
        # The counters of all pushers come first in an inbox.
        self._counters_bytes = aligned(world.size * COUNTER_BYTES)
        # In the order of `owned_parts`.
        others = (*range(world.rank + 1, world.size), *range(world.rank))
        self._rings = {owner: _Ring(owner) for owner in others}
        # What the last Put of a counter carried: untouched until that is flushed.
        self._sent = np.zeros(world.size, dtype=np.int64)
        # What was read back of it.
        self._confirmed = np.zeros(world.size, dtype=np.int64)
        self._taken = np.zeros(world.size, dtype=np.int64)
        self._taken_bytes = memoryview(self._taken.view(np.uint8))  # type: ignore[arg-type]
        self._unflushed: list[int] = []
        self._serving = threading.Lock()

    def plan(self, layouts: Sequence[Layout]) -> Footprint:
        """Divide the memory among the other ranks. Local.

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
        useful = 2 * sum(self._slot_bytes(numel) for numel in self.trained.values())
        share = self._mailbox_bytes // max(1, num_rings)
        self._ring_bytes = max(smallest, min(share, useful)) // smallest * smallest
        self._max_numel = (self._ring_bytes // SLOTS_PER_RING - self._slots.values_offset) // self.dtype.itemsize
        self._inbox_bytes = self._counters_bytes + num_rings * self._slots.host_ring_bytes(self._ring_bytes)
        return Footprint(2 + self._slots.num_windows, self._inbox_bytes + self._counters_bytes)

    def allocate(self) -> None:  # noqa: D102
        # Two, so that no two threads ever put into or flush the same: the one that pushes, and the one that serves.
        self._inbox = Window(self.world, self._inbox_bytes, torch.uint8)
        self._returns = Window(self.world, self._counters_bytes, torch.uint8)
        self._arrived_bytes = memoryview(self._inbox.tensor.numpy()[: self._sent.nbytes])  # type: ignore[arg-type]
        self._arrived = self._inbox.tensor.numpy()[: self._sent.nbytes].view(np.int64)
        self._done = self._returns.tensor.numpy()[: self._sent.nbytes].view(np.int64)
        self._slots.allocate(self._inbox, self._counters_bytes, self._ring_bytes, self.trained)
        self.world.progress.add(self.serve)

    def shard(self, index: int) -> torch.Tensor:  # noqa: D102
        return self._slots.shards[index]

    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Pending:  # noqa: D102
        assert gradient.dtype == self.dtype
        push = _Push(self.layouts[index].name, gradient)
        whole, own = self._slots.values(gradient), []
        for owner, begin, part in self.pieces(index, start, start + gradient.numel()):
            if owner == self.world.rank:
                own.append((begin, part))
            else:
                values = whole[part]
                push.numel += len(values)
                self._rings[owner].pieces.append(_Piece(push, index, begin, values))
        owners = [ring.owner for ring in self._rings.values() if ring.pieces]
        with self.world.deadline(f"pushing the gradient of unit {push.name}", owners):
            self._put_what_fits()
            for begin, part in own:
                self._slots.add_own(index, begin, gradient[part])
        self.serve()
        return Later(partial(self._wait, push))

    def flush(self) -> None:  # noqa: D102
        for ring in self._rings.values():
            while ring.pieces:
                self._wait(ring.pieces[-1].push)
        with self.world.deadline("flushing gradients"):
            self._slots.flush()
            self._confirm()

    def serve(self) -> bool:
        """Add what has arrived and hand its room back; a few microseconds if nothing has. Local, from any thread."""
        self._inbox.sync()
        # As bytes: a look every other millisecond, beside a rank that computes, is to cost as little as it can.
        if not self._unflushed and self._arrived_bytes == self._taken_bytes:
            return False
        if not self._serving.acquire(blocking=False):  # another thread is at it
            return False
        try:
            self._drain()
        finally:
            self._serving.release()
        return True

    def complete(self) -> None:  # noqa: D102
        with self.world.deadline("adding the last gradients"), self._serving:
            self._inbox.sync()
            self._drain()
        assert (self._arrived == self._taken).all(), "a rank came to A before its gradients had arrived"

    def free(self) -> None:  # noqa: D102
        self.world.progress.remove(self.serve)
        del self._arrived, self._arrived_bytes, self._done
        self._slots.free()
        self._returns.free()
        self._inbox.free()

    def _wait(self, push: "_Push") -> None:
        """Wait until a push is in its owners' rings, serving meanwhile. One-sided; full rings wait for their owners."""
        while push.numel:
            owner = next(ring.owner for ring in self._rings.values() if any(p.push is push for p in ring.pieces))
            with self.world.deadline(f"waiting for room to push the gradient of unit {push.name}", [owner]):
                wait_until(self._put_what_fits, self._help_owners)

    def _help_owners(self) -> None:
        # The owner must hear of what is there before it can make room.
        self._slots.flush()
        self.world.progress.poke()

    def _put_what_fits(self) -> bool:
        """Put pieces into their owners' rings as far as there is room; return whether any was."""
        self._returns.sync()
        filled = [(ring, headers) for ring in self._rings.values() if (headers := self._fill(ring))]
        for ring, _ in filled:
            # A round trip over a network, so one for all slots. It also lets go of the counter of the time before.
            self._slots.flush(ring.owner)
            self._sent[ring.owner] = ring.sent
            self._inbox.put(ring.owner, self.world.rank * COUNTER_BYTES, _counter(self._sent, ring.owner))
        return bool(filled)

    def _confirm(self) -> None:
        """Wait until every owner's memory shows the counter that was sent to it. After a flush."""
        late = np.flatnonzero(self._confirmed != self._sent).tolist()
        while late:
            for owner in late:
                self._inbox.get(owner, _counter(self._confirmed, owner), self.world.rank * COUNTER_BYTES)
            self._inbox.flush()
            late = [owner for owner in late if self._confirmed[owner] != self._sent[owner]]

    def _fill(self, ring: "_Ring") -> list[np.ndarray]:
        """Start to put pieces into a ring; return their headers, which are to be kept until the flush."""
        end = int(self._done[ring.owner]) + self._ring_bytes
        headers = []
        while ring.pieces:
            piece, place = ring.pieces[0], ring.sent % self._ring_bytes
            # Nor does a slot go round the end of the ring. At least one element fits behind a header.
            fitting = (self._ring_bytes - place - self._slots.values_offset) // self.dtype.itemsize
            values = piece.values[: min(self._max_numel, fitting)]
            num_bytes = self._slot_bytes(len(values))
            if ring.sent + num_bytes > end:
                break
            header = np.array([piece.index, piece.start, len(values), ring.sent], dtype=np.int64)
            self._slots.put(ring.owner, place, header.view(np.uint8), values)
            headers.append(header)
            ring.sent += num_bytes
            piece.push.numel -= len(values)
            piece.start, piece.values = piece.start + len(values), piece.values[len(values) :]
            if not len(piece.values):
                ring.pieces.popleft()
        return headers

    def _drain(self) -> None:
        """Add what has arrived, in the order of ranks. Only by who holds `_serving`."""
        what = "handing room in the mailbox back"
        with self.world.deadline(what, self._unflushed):
            # Complete since the last time, as a rule. Only then may a counter be put again.
            for pusher in self._unflushed:
                self._returns.flush(pusher)
            self._unflushed.clear()
        pushers = np.flatnonzero(self._arrived > self._taken).tolist()
        with self.world.deadline(what, pushers):
            for pusher in pushers:
                headers, end = self._headers(pusher, int(self._taken[pusher]), int(self._arrived[pusher]))
                self._slots.add(pusher, headers)
                self._taken[pusher] = end
                self._inbox.sync()  # nor may one come after the Put that lets the pusher overwrite the slot
                self._returns.put(pusher, self.world.rank * COUNTER_BYTES, _counter(self._taken, pusher))
                self._unflushed.append(pusher)

    def _headers(self, pusher: int, taken: int, sent: int) -> tuple[list[Header], int]:
        """Return the headers of one pusher's slots, from `taken` on, and the end of the last slot."""
        self._inbox.sync()  # no load of a slot may come before that of the counter
        headers = []
        # The last one may end behind `sent`, whose bytes may not have come all at once.
        while taken < sent:
            place = taken % self._ring_bytes
            array, start, numel, position = self._slots.header(pusher, place)
            assert position == taken, f"rank {pusher}'s slot {taken} says that it is {position}"
            headers.append(Header(array, start, numel, place))
            taken += self._slot_bytes(numel)
        return headers, taken

    def _slot_bytes(self, numel: int) -> int:
        return aligned(self._slots.values_offset + numel * self.dtype.itemsize, self._slots.alignment)


@dataclass
class _Push:
    """A gradient of which `numel` elements are not in their owners' rings yet; it is kept until then."""

    name: str
    gradient: torch.Tensor
    numel: int = 0


@dataclass
class _Piece:
    """Elements for one owner, from `start` of its shard on, that are not in its ring yet."""

    push: _Push
    index: int
    start: int
    values: Memory


@dataclass
class _Ring:
    """This rank's ring in an owner's inbox: bytes put since the beginning, and what is to come."""

    owner: int
    sent: int = 0
    pieces: deque[_Piece] = field(default_factory=deque)


def _counter(counters: np.ndarray, rank: int) -> np.ndarray:
    return counters[rank : rank + 1].view(np.uint8)

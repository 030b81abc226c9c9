"""Work queue for items, such as generated groups, that one rank has produced and any idle rank can claim.

Items are numbered from 0, and all ranks know how many there are. The state of an item is a 64-bit word in a window of
rank 0, the *board*. The item's content is in the *store*, a fixed-size window of the rank that produced it (its
*owner*). All accesses are one-sided: neither rank 0 nor the owner takes part.

    mark_started   this rank is working on the item
    publish        the item can be claimed: its content is in this rank's store (written before the board)
    mark_done      the item is finished, and no rank needs to claim it
    claim          take published items, largest first (MPI_Fetch_and_op on a counter per item)
    has_changed    poll a single counter on the board, which counts all state changes except those to FETCHED
    reset          clear the board and the stores, after gradients are complete and before parameters are published

Note: each item once
    At first, only the owner of an item changes its word: from NOT_STARTED to STARTED to PUBLISHED, or to DONE if no
    rank needs to claim the item. The first rank to increment the claim counter of a published item changes the word to
    CLAIMED. After reading the content, this rank sets the word to FETCHED, and the owner may reuse the memory. Ranks
    reach the synchronization point at which gradients are complete only when no word is NOT_STARTED, STARTED or
    PUBLISHED. No rank can then claim an item, so no claim can overlap with `reset`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from odc_mpi.comm.windows.rma import Window, align_up, messages
from odc_mpi.runtime.world import World

#: States of an item, the lowest bits of its word.
_NOT_STARTED, _STARTED, _PUBLISHED, _CLAIMED, _DONE, _FETCHED = range(6)
#: Layout of a word: 3 bits for the state, 16 for the owner's rank, and 44 for the size in bytes.
_RANK_SHIFT, _SIZE_SHIFT, _RANK_MASK = 3, 19, 0xFFFF


class QueueState(NamedTuple):
    """Snapshot of the item states in a `WorkQueue`.

    Attributes:
        in_progress: For each item that is started but not published or done, the rank that is working on it.
        published: Items that can be claimed, largest first.
        num_done: Number of items that are claimed or done.
        num_changes: Number of state changes before the snapshot, for `WorkQueue.has_changed`.
    """

    in_progress: dict[int, int]
    num_not_started: int
    published: list[int]
    num_done: int
    num_changes: int


class WorkQueue:
    """Queue of items, each of which can be claimed by at most one rank. Construction is collective.

    Args:
        max_count: Maximum number of items between two calls to `reset`. Must be the same on all ranks.
        store_bytes: Size of this rank's store in bytes. Too little memory on a node raises `AllRanksUserError`.
    """

    def __init__(self, world: World, max_count: int, store_bytes: int) -> None:
        self._world = world
        store_bytes = align_up(store_bytes)
        # After the items' words: each item's offset in its owner's store, claims of each item, number of changes.
        self._first_offset, self._first_claims, self._changes = max_count, 2 * max_count, 3 * max_count
        board_numel = 3 * max_count + 1
        world.require_shared_memory(store_bytes + 8 * board_numel, "the work queue")
        self._board = Window(world, board_numel if world.rank == 0 else 0, torch.int64, same_size=False)
        self._store = Window(world, store_bytes, torch.uint8, same_size=False)
        self._held: dict[int, tuple[int, int]] = {}  # offset and size by item
        world.on_close(self.close)
        world.wait_collective(world.comm.Ibarrier(), "allocating the work queue")

    def mark_started(self, item: int) -> None:
        """Record that this rank is working on an item. One-sided. All ranks can see this in a `snapshot`."""
        self._write(item, _word(_STARTED, self._world.rank))

    def mark_done(self, item: int) -> None:
        """Record that an item is finished and that no rank needs to claim it. One-sided."""
        self._write(item, _word(_DONE, self._world.rank))

    def publish(self, item: int, content: bytes) -> bool:
        """Publish an item for any idle rank to claim. One-sided. Returns False if this rank's store is too full."""
        start = self._find_space(len(content))
        if start is None:
            return False
        memory = self._store.tensor.numpy()
        memory[start : start + len(content)] = np.frombuffer(content, dtype=np.uint8)
        self._held[item] = start, len(content)
        self._store.sync()
        with self._world.deadline("publishing finished work", [0]):
            self._board.atomic_store(0, self._first_offset + item, start)
        self._write(item, _word(_PUBLISHED, self._world.rank, len(content)))
        return True

    def snapshot(self, count: int) -> QueueState:
        """Return the states of the first `count` items. One-sided."""
        num_changes = self._num_changes()  # first, so that `has_changed` detects changes during the snapshot
        words = self._words(count)
        states, sizes = words & 7, words >> _SIZE_SHIFT
        published = np.flatnonzero(states == _PUBLISHED)
        owners = (words >> _RANK_SHIFT) & _RANK_MASK
        return QueueState(
            in_progress={int(item): int(owners[item]) for item in np.flatnonzero(states == _STARTED)},
            num_not_started=int(np.count_nonzero(states == _NOT_STARTED)),
            # By size, then by number.
            published=published[np.lexsort((published, -sizes[published]))].tolist(),
            num_done=int(np.count_nonzero(states >= _CLAIMED)),
            num_changes=num_changes,
        )

    def has_changed(self, state: QueueState) -> bool:
        """Return True if any item was started, published, claimed or marked done since `state` was taken. One-sided."""
        return self._num_changes() != state.num_changes

    def claim(self, published: Sequence[int]) -> Iterator[tuple[int, int, bytes]]:
        """Claim the items in `published`, except those that another rank claims first. One-sided.

        `published` is the list in a `QueueState`. After the first item that another rank has claimed, this rank skips
        to a position in the list that depends on its rank, so that idle ranks do not compete for the same items.

        Yields `(item, owner, content)` for each claimed item, where `owner` is the rank that published it.
        """
        unclaimed, position = list(published), 0
        while unclaimed:
            item = unclaimed.pop(position % len(unclaimed))
            if (content := self._try_claim(item)) is not None:
                yield item, *content
            elif not position:
                position = len(unclaimed) * self._world.rank // self._world.size

    def reset(self) -> None:
        """Remove all items. One-sided. All ranks call this between `complete_gradients` and `publish_parameters`."""
        self._held.clear()
        if self._world.rank == 0:
            # Atomic like the claims: where network cards do the addition, a plain store may stay in the CPU cache.
            with self._world.deadline("clearing the work queue", [0]):
                self._board.atomic_store_all(0, np.zeros(self._changes + 1, dtype=np.int64))

    def close(self) -> None:
        """Free the queue's memory. Collective. Idempotent."""
        if self._changes:
            self._changes = 0
            with self._world.collective("freeing the work queue"):
                self._board.free()
                self._store.free()
            self._world.cancel_on_close(self.close)

    def _try_claim(self, item: int) -> tuple[int, bytes] | None:
        with self._world.deadline("claiming finished work", [0]):
            if self._board.fetch_and_add(0, self._first_claims + item, 1):
                return None
            word = self._board.atomic_read(0, item)
            start = self._board.atomic_read(0, self._first_offset + item)
        self._write(item, word ^ _PUBLISHED ^ _CLAIMED)
        owner, size = (word >> _RANK_SHIFT) & _RANK_MASK, word >> _SIZE_SHIFT
        buffer = np.empty(size, dtype=np.uint8)
        with self._world.deadline("fetching finished work", [owner]):
            self._store.get_messages(buffer, messages(owner, start, size))
            self._store.flush(owner)
        with self._world.deadline("releasing fetched work", [0]):
            self._board.atomic_store(0, item, _word(_FETCHED, owner))  # not counted as a change: no rank waits for it
        return owner, buffer.tobytes()

    def _find_space(self, size: int) -> int | None:
        """Return the offset of `size` free bytes in this rank's store, or None if there are none. One-sided."""
        start = self._find_gap(size)
        if start is None and self._held:
            words = self._words(max(self._held) + 1)
            self._held = {item: offset for item, offset in self._held.items() if words[item] & 7 != _FETCHED}
            start = self._find_gap(size)
        return start

    def _find_gap(self, size: int) -> int | None:
        begin = 0
        for start, held_bytes in sorted(self._held.values()):
            if start - begin >= size:
                return begin
            begin = align_up(start + held_bytes)
        return begin if len(self._store.tensor) - begin >= size else None

    def _words(self, count: int) -> np.ndarray:
        with self._world.deadline("reading the state of the work queue", [0]):
            return self._board.atomic_read_all(0, count)

    def _num_changes(self) -> int:
        with self._world.deadline("reading the number of changes of the work queue", [0]):
            return self._board.atomic_read(0, self._changes)

    def _write(self, item: int, word: int) -> None:
        with self._world.deadline("writing the state of an item", [0]):
            self._board.atomic_store(0, item, word)
            self._board.fetch_and_add(0, self._changes, 1)


def _word(state: int, rank: int, size: int = 0) -> int:
    return state | rank << _RANK_SHIFT | size << _SIZE_SHIFT

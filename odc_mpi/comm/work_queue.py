"""Finished pieces of work, on their way to whoever is free: a board of what there is, and a bounded store on each rank.

Each piece has a number below a count that all ranks know. Its state is one 64-bit word on a board, which the lowest
rank hosts; its content lies in the memory of the rank that finished it, open to all others. All is one-sided: the host
of the board and the owner of a piece take no part.

    between B and A    begin:    I have this piece in work
                       offer:    it is finished, its content lies with me (stores of the owner, then the board)
                       settle:   it is finished, nobody else need do anything
                       claim:    the largest offered piece is mine now (MPI_Compare_and_swap on its word)
    between A and B    reset:    the host clears the board, each rank its store

Note: each piece once
    A word goes from 0 over `begun` to `published` by its owner alone, and from `published` to `taken` by one
    compare-and-swap, which succeeds for one rank. `taken` becomes `fetched` when the content has been read; only then
    does the owner use that part of its store again. A rank comes to A when no word is left that is 0, begun or
    offered; words change no more then, so no claim can meet the reset.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from odc_mpi.comm.windows.rma import Window, align_up
from odc_mpi.runtime.world import World

#: States of a piece, the lowest bits of its word.
_UNCLAIMED, _STARTED, _PUBLISHED, _CLAIMED, _DONE, _FETCHED = range(6)
#: A word: 3 bits of state, 16 of the owner's rank, 44 of the size in bytes.
_RANK_SHIFT, _SIZE_SHIFT, _RANK_MASK = 3, 19, 0xFFFF


class QueueState(NamedTuple):
    """The board at a moment.

    Attributes:
        open: Pieces that are not finished, and the ranks that have them in work.
        num_unseen: Pieces that nobody has begun.
        offered: Pieces that may be claimed.
        num_done: Pieces that are taken or settled.
    """

    in_progress: dict[int, int]
    num_unclaimed: int
    published: list[int]
    num_done: int


class WorkQueue:
    """Pieces below a count, each for exactly one rank. Making one is collective.

    Args:
        world: The ranks; freed with it.
        max_count: The most pieces between two resets, the same on every rank.
        store_bytes: Memory of this rank for pieces that wait to be claimed.
    """

    def __init__(self, world: World, max_count: int, store_bytes: int) -> None:
        self._world = world
        own = align_up(store_bytes)
        world.require_shared_memory(own + 16 * max_count, "finished work that waits for a free rank")
        # The second half of the board: where in its owner's store a piece begins.
        self._max_count = max_count
        self._board = Window(world, 2 * max_count if world.rank == 0 else 0, torch.int64, same_size=False)
        self._store = Window(world, own, torch.uint8, same_size=False)
        self._held: dict[int, tuple[int, int]] = {}  # piece: first byte, bytes
        world.on_close(self.close)
        world.wait_collective(world.comm.Ibarrier(), "opening the exchange of finished work")

    def mark_started(self, item: int) -> None:
        """Say that this rank has a piece in work. One-sided."""
        self._write(item, _word(_STARTED, self._world.rank))

    def mark_done(self, item: int) -> None:
        """Say that nobody else need do anything about a piece. One-sided."""
        self._write(item, _word(_DONE, self._world.rank))

    def publish(self, item: int, content: bytes) -> bool:
        """Lay a piece into this rank's store for whoever is free. One-sided.

        Returns:
            Whether there was room. If not, the piece is still this rank's.
        """
        place = self._find_space(len(content))
        if place is None:
            return False
        memory = self._store.tensor.numpy()
        memory[place : place + len(content)] = np.frombuffer(content, dtype=np.uint8)
        self._held[item] = place, len(content)
        self._store.sync()
        with self._world.deadline("offering finished work", [0]):
            self._board.atomic_store(0, self._max_count + item, place)
            self._board.atomic_store(0, item, _word(_PUBLISHED, self._world.rank, len(content)))
        return True

    def snapshot(self, count: int) -> QueueState:
        """Return the state of the first `count` pieces; the largest offered first. One-sided."""
        words = self._words(count)
        states, sizes = words & 7, words >> _SIZE_SHIFT
        offered = np.flatnonzero(states == _PUBLISHED)
        owners = (words >> _RANK_SHIFT) & _RANK_MASK
        begun = np.flatnonzero(states == _STARTED)
        return QueueState(
            in_progress={int(piece): int(owners[piece]) for piece in begun},
            num_unclaimed=int(np.count_nonzero(states == _UNCLAIMED)),
            # By size, then by number.
            published=offered[np.lexsort((offered, -sizes[offered]))].tolist(),
            num_done=int(np.count_nonzero(states >= _CLAIMED)),
        )

    def claim(self, count: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield offered pieces that are this rank's from then on, the largest first, while there are any. One-sided.

        Args:
            count: Of pieces, the same on every rank.

        Yields:
            The piece, the rank that finished it, and the content.
        """
        while offered := self.snapshot(count).published:
            for piece in offered:
                if (content := self._try_claim(piece)) is not None:
                    yield piece, *content
                    break

    def reset(self) -> None:
        """Start over. Local, on every rank: after A, when no piece is left, and before B."""
        self._held.clear()
        if self._world.rank == 0:
            # By the same way as a claim: where network cards swap, they do not look at the processor's caches.
            with self._world.deadline("clearing the board of finished work", [0]):
                self._board.atomic_store_all(0, np.zeros(2 * self._max_count, dtype=np.int64))

    def close(self) -> None:
        """Free board and store. Collective; a second call does nothing."""
        if self._max_count:
            self._max_count = 0
            with self._world.collective("freeing the exchange of finished work"):
                self._board.free()
                self._store.free()
            self._world.cancel_on_close(self.close)

    def _try_claim(self, item: int) -> tuple[int, bytes] | None:
        """Claim a piece and return its owner and content; None if another rank was first."""
        with self._world.deadline("claiming finished work", [0]):
            word = self._board.atomic_read(0, item)
            if (
                word & 7 != _PUBLISHED
                or self._board.compare_and_swap(0, item, word, word ^ _PUBLISHED ^ _CLAIMED) != word
            ):
                return None
            place = self._board.atomic_read(0, self._max_count + item)
        owner, size = (word >> _RANK_SHIFT) & _RANK_MASK, word >> _SIZE_SHIFT
        buffer = np.empty(size, dtype=np.uint8)
        with self._world.deadline("fetching finished work", [owner]):
            self._store.get(owner, buffer, place)
            self._store.flush(owner)
        self._write(item, _word(_FETCHED, owner))
        return owner, buffer.tobytes()

    def _find_space(self, size: int) -> int | None:
        """Return where so many bytes fit into this rank's store, or None."""
        if self._held:
            words = self._words(max(self._held) + 1)
            self._held = {piece: where for piece, where in self._held.items() if words[piece] & 7 != _FETCHED}
        begin = 0
        for place, held in sorted(self._held.values()):
            if place - begin >= size:
                return begin
            begin = align_up(place + held)
        return begin if len(self._store.tensor) - begin >= size else None

    def _words(self, count: int) -> np.ndarray:
        with self._world.deadline("looking for finished work", [0]):
            return self._board.atomic_read_all(0, count)

    def _write(self, item: int, word: int) -> None:
        with self._world.deadline("telling the state of work", [0]):
            self._board.atomic_store(0, item, word)


def _word(state: int, rank: int, size: int = 0) -> int:
    return state | rank << _RANK_SHIFT | size << _SIZE_SHIFT

"""Counter for the bytes that a store moves between this rank and other ranks, within its node and between nodes."""

import functools
from collections.abc import Sequence

import numpy as np

from odc_mpi.comm.layout import FlatLayout, ranges_by_owner

#: Locations of other ranks: on this rank's node, or on other nodes.
LOCATIONS = ("same_node", "other_nodes")
FETCHED, PUSHED = range(2)


class Traffic:
    """Counter for the bytes, without message headers, that this rank moves from or to other ranks' shards.

    Args:
        row: `FETCHED` or `PUSHED`.
        rank: This rank.
        node_ranks: Ranks on this node.

    Attributes:
        moved: Bytes of each transfer since the last `take`, int64 `[2, len(LOCATIONS)]`. Threads may append to it.
    """

    def __init__(self, row: int = FETCHED, rank: int = 0, node_ranks: Sequence[int] = ()) -> None:
        self._row, self._rank, self._node_ranks = row, rank, node_ranks
        self.moved: list[np.ndarray] = []
        # Few different ranges are moved, but each may have a thousand owners.
        self._bytes_of = functools.cache(self._count)

    def add(self, layout: FlatLayout, itemsize: int, start: int = 0, stop: int | None = None) -> None:
        """Count elements `[start, stop)` of an array, by default all of them, of `itemsize` bytes each."""
        self.moved.append(self._bytes_of(layout.shard_numel, start, layout.numel if stop is None else stop, itemsize))

    def take(self) -> np.ndarray:
        """Return the sum of `moved`, and clear it. No other thread may append meanwhile."""
        moved, self.moved = self.moved, []
        return np.array(moved, dtype=np.int64).reshape(-1, 2, len(LOCATIONS)).sum(axis=0)

    def _count(self, shard_numel: int, start: int, stop: int, itemsize: int) -> np.ndarray:
        counts = np.zeros((2, len(LOCATIONS)), dtype=np.int64)
        for owner, begin, end in ranges_by_owner(shard_numel, self._rank, start, stop):
            if owner != self._rank:
                counts[self._row, int(owner not in self._node_ranks)] += (end - begin) * itemsize
        return counts

"""Counter for the bytes that this rank fetches from and pushes to other ranks, within its node and between nodes."""

import functools

import numpy as np

from odc_mpi.comm.layout import ranges_by_owner
from odc_mpi.comm.transport import Transport

#: Locations of other ranks: on this rank's node, or on other nodes.
LOCATIONS = ("same_node", "other_nodes")


class TrafficCounter:
    """Counter for the bytes that this rank transfers to and from other ranks' shards. Not thread-safe.

    Zero-copy fetches, fetches of arrays that are already in the node's cache, and message headers are not counted.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        # Bytes fetched and bytes pushed since the last call of `bytes_since_last_call`, each by `LOCATIONS`.
        self._bytes = np.zeros((2, len(LOCATIONS)), dtype=np.int64)
        # Few different ranges are counted, but each may have a thousand owners.
        self._by_owner = functools.cache(self._by_location)

    def add_fetch(self, index: int) -> None:
        """Count the bytes that a fetch of array `index` transfers from other ranks."""
        parameters = self._transport.parameters
        if parameters.transfers and not parameters.layouts[index].node_ranks:
            self._bytes[0] += self._bytes_of(index)

    def add_push(self, index: int, start: int, stop: int) -> None:
        """Count the bytes that a push of elements `[start, stop)` of array `index` transfers to other ranks."""
        self._bytes[1] += self._by_owner(index, start, stop, self._transport.gradients.dtype.itemsize)

    def bytes_since_last_call(self) -> list[int]:
        """Return the bytes fetched, then those pushed, since the last call, by `LOCATIONS`. Call once per minibatch."""
        cache = self._transport.node_cache
        for index in cache.take_shared_fetches() if cache else ():
            self._bytes[0] -= self._bytes_of(index)
        if self._transport.exchange:
            self._bytes += self._exchanged
        num_bytes = self._bytes.ravel().tolist()
        self._bytes[:] = 0
        return num_bytes

    def _bytes_of(self, index: int) -> np.ndarray:
        parameters = self._transport.parameters
        return self._by_owner(index, 0, parameters.layouts[index].numel, parameters.dtype_of(index).itemsize)

    def _by_location(self, index: int, start: int, stop: int, itemsize: int) -> np.ndarray:
        layout, island = self._transport.parameters.layouts[index], self._transport.group.island
        counts = np.zeros(len(LOCATIONS), dtype=np.int64)
        for owner, begin, end in ranges_by_owner(layout.shard_numel, island.rank, start, stop):
            if owner != island.rank:
                counts[int(owner not in island.node_ranks)] += (end - begin) * itemsize
        return counts

    @functools.cached_property
    def _exchanged(self) -> np.ndarray:
        """Bytes received from and pushed to other islands per minibatch, by location."""
        assert self._transport.exchange is not None
        counts = np.zeros_like(self._bytes)
        for i, num_bytes in enumerate(self._transport.exchange.bytes_per_minibatch()):
            for rank, count in num_bytes.items():
                counts[i, int(rank not in self._transport.group.world.node_ranks)] += count
        return counts

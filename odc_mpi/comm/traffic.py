"""Counter for the bytes that this rank fetches from and pushes to other ranks, within its node and between nodes."""

import functools
from collections import Counter

from odc_mpi.comm.layout import ranges_by_owner
from odc_mpi.comm.transport import Transport

#: Places where other ranks can be: on this rank's node, or on other nodes.
PLACES = ("same_node", "other_nodes")


class TrafficCounter:
    """Counter for the bytes that this rank transfers from and to the shards of other ranks. Not thread-safe.

    Zero-copy fetches, fetches of arrays that are already in the node's cache, and message headers do not count.

    Attributes:
        fetched: Bytes fetched since construction from ranks on the same node and on other nodes (keys: `PLACES`).
            Fetches served by the node's cache are included until `bytes_since_last_call` subtracts them.
        pushed: Bytes pushed since construction, with the same keys.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.fetched: Counter[str] = Counter()
        self.pushed: Counter[str] = Counter()
        self._last = self.fetched, self.pushed
        # Few different ranges are counted, but each may have a thousand owners.
        self._by_owner = functools.cache(self._by_place)

    def add_fetch(self, index: int) -> None:
        """Count the bytes that a fetch of array `index` transfers from other ranks."""
        if self._transport.parameters.access.transfers:
            self.fetched = self.fetched + self._bytes_of(index)

    def add_push(self, index: int, start: int, stop: int) -> None:
        """Count the bytes that a push of elements `[start, stop)` of array `index` transfers to other ranks."""
        self.pushed = self.pushed + self._by_owner(index, start, stop, self._transport.gradients.dtype.itemsize)

    def bytes_since_last_call(self) -> list[int]:
        """Return the bytes fetched, then pushed, since the last call, each by `PLACES`. Call once per minibatch."""
        cache = self._transport.node_cache
        for index in cache.take_shared_fetches() if cache else ():
            self.fetched = self.fetched - self._bytes_of(index)
        if self._transport.exchange:
            received, pushed = self._exchanged
            self.fetched, self.pushed = self.fetched + received, self.pushed + pushed
        now, last = (self.fetched, self.pushed), self._last
        self._last = now
        return [new[place] - old[place] for new, old in zip(now, last, strict=True) for place in PLACES]

    def _bytes_of(self, index: int) -> Counter[str]:
        parameters = self._transport.parameters
        return self._by_owner(index, 0, parameters.layouts[index].numel, parameters.dtype_of(index).itemsize)

    def _by_place(self, index: int, start: int, stop: int, itemsize: int) -> Counter[str]:
        layout, island, counts = self._transport.parameters.layouts[index], self._transport.group.island, Counter[str]()
        for owner, begin, end in ranges_by_owner(layout.shard_numel, island.rank, start, stop):
            if owner != island.rank:
                counts[PLACES[owner not in island.node_ranks]] += (end - begin) * itemsize
        return counts

    @functools.cached_property
    def _exchanged(self) -> list[Counter[str]]:
        """Bytes received from and pushed to other islands per minibatch, by place."""
        assert self._transport.exchange is not None
        result, node_ranks = [], self._transport.group.world.node_ranks
        for num_bytes in self._transport.exchange.bytes_per_minibatch():
            counts = Counter[str]()
            for rank, count in num_bytes.items():
                counts[PLACES[rank not in node_ranks]] += count
            result.append(counts)
        return result

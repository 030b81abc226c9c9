"""Counter of the bytes that this rank fetches from and pushes to other ranks, within its node and between nodes.

Accesses to the shards of this rank, zero-copy fetches and message headers are not counted.
"""

import functools
from dataclasses import dataclass

from odc_mpi.comm.shard_storage import ranges_by_owner
from odc_mpi.comm.transport import Access, Transport


@dataclass
class ByteCounts:
    """Bytes exchanged with other ranks of this node (`same_node`) and with ranks of other nodes (`other_nodes`)."""

    same_node: int = 0
    other_nodes: int = 0

    def __add__(self, other: "ByteCounts") -> "ByteCounts":
        return ByteCounts(self.same_node + other.same_node, self.other_nodes + other.other_nodes)

    def __sub__(self, other: "ByteCounts") -> "ByteCounts":
        return ByteCounts(self.same_node - other.same_node, self.other_nodes - other.other_nodes)


class TrafficCounter:
    """Counter of the bytes that this rank fetches and pushes through a transport. Not thread-safe.

    Attributes:
        fetched: Bytes fetched since construction.
        pushed: Bytes pushed since construction.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.fetched = ByteCounts()
        self.pushed = ByteCounts()
        self._last = ByteCounts(), ByteCounts()
        # Few different ranges are counted, but each may have a thousand owners.
        self._by_owner = functools.cache(self._by_location)

    def add_fetch(self, index: int) -> None:
        """Count the bytes of one fetch of an array."""
        parameters = self._transport.parameters
        if parameters.access is Access.COPY:
            numel, itemsize = parameters.layouts[index].numel, parameters.dtype_of(index).itemsize
            self.fetched += self._by_owner(index, 0, numel, itemsize)

    def add_push(self, index: int, start: int, stop: int) -> None:
        """Count the bytes of one push of the elements from `start` to `stop`, exclusive, of an array."""
        self.pushed += self._by_owner(index, start, stop, self._transport.gradients.dtype.itemsize)

    def bytes_since_last_call(self) -> tuple[int, int, int, int]:
        """Return the bytes counted since the last call.

        Returns:
            Bytes fetched from this node, fetched from other nodes, pushed to this node and pushed to other nodes.
        """
        (fetched, pushed), self._last = self._last, (self.fetched, self.pushed)
        fetched, pushed = self.fetched - fetched, self.pushed - pushed
        return fetched.same_node, fetched.other_nodes, pushed.same_node, pushed.other_nodes

    def _by_location(self, index: int, start: int, stop: int, itemsize: int) -> ByteCounts:
        layout, group, total = self._transport.parameters.layouts[index], self._transport.group, ByteCounts()
        for owner, begin, end in ranges_by_owner(layout, group.rank, start, stop):
            if owner != group.rank:
                num_bytes = (end - begin) * itemsize
                total += ByteCounts(num_bytes, 0) if group.is_on_this_node(owner) else ByteCounts(0, num_bytes)
        return total

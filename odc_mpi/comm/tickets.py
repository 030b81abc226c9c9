"""Handing out the microbatches of a minibatch: whoever is free draws the next.

A ticket is the right to one position in a list that all ranks know. The lowest rank of each node hosts a counter in an
MPI window; drawing is one MPI_Fetch_and_op, and the host takes no part. Each node has its share of the positions, so
that draws stay on the node as long as it has any; then its ranks draw from the other nodes. Which of these have run
out, too, the ranks of a node tell each other beside their counter, so that it is not each of them who asks every node.

    between B and A    draw: whoever is free
    between A and B    reset: each host sets its counter and the note beside it to zero

No draw can meet the reset. Before a rank comes to A it has drawn all it will, and it draws again only after B.
"""

from collections.abc import Iterator

import torch

from odc_mpi.comm.windows.rma import Window
from odc_mpi.runtime.world import World

#: What a host keeps: how many positions were drawn, and how many other nodes are known to have none left.
_DRAWN, _EMPTY = range(2)


class Tickets:
    """Positions below a count, each for exactly one rank. Making one is collective.

    Args:
        world: The ranks that draw; freed with it.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        nodes = world.gather_objects(world.node)
        # From this node on, around: so the nodes that have run out do not all turn to the same one.
        self._others = [(world.node + i) % world.num_nodes for i in range(1, world.num_nodes)]
        # Of every `size` positions in a row a node has as many as it has ranks, spread like these.
        self._offsets = [[rank for rank, node in enumerate(nodes) if node == own] for own in range(world.num_nodes)]
        self._window = Window(world, 2, torch.int64)
        world.on_close(self.close)
        world.wait_collective(world.comm.Ibarrier(), "setting the ticket counters to zero")

    def draw(self, count: int) -> Iterator[int]:
        """Yield positions that no other rank gets, for as long as there are any. One-sided, at each position.

        A position is drawn when it is asked for, not before: what a rank does with one decides how many it gets.

        Args:
            count: Of positions, the same on every rank.
        """
        own = self._world.node
        while (position := self._next(own)) < count:
            yield position
        while (num_empty := self._num_empty()) < len(self._others):
            position = self._next(self._others[num_empty])
            if position < count:
                yield position
            else:
                # Another rank may have come further meanwhile; then a node is asked once more, and has still none.
                with self._world.deadline("noting which nodes have tickets left", [self._host(own)]):
                    self._window.atomic_store(self._host(own), _EMPTY, num_empty + 1)

    def reset(self) -> None:
        """Start over. Local, on every rank: after A, when all have drawn, and before B."""
        host = self._host(self._world.node)
        if self._world.rank == host:
            # By the same way as a draw: where network cards add, they do not look at the processor's caches.
            with self._world.deadline("setting the ticket counters to zero", [host]):
                self._window.atomic_store(host, _DRAWN, 0)
                self._window.atomic_store(host, _EMPTY, 0)

    def close(self) -> None:
        """Free the counters. Collective; a second call does nothing."""
        if self._offsets:
            self._offsets = []
            with self._world.collective("freeing the ticket counters"):
                self._window.free()
            self._world.cancel_on_close(self.close)

    def _next(self, node: int) -> int:
        host, offsets = self._host(node), self._offsets[node]
        with self._world.deadline("drawing a ticket", [host]):
            turn = self._window.fetch_and_add(host, _DRAWN, 1)
        around, place = divmod(turn, len(offsets))
        return around * self._world.size + offsets[place]

    def _num_empty(self) -> int:
        host = self._host(self._world.node)
        with self._world.deadline("looking which nodes have tickets left", [host]):
            return self._window.atomic_read(host, _EMPTY)

    def _host(self, node: int) -> int:
        return self._offsets[node][0]

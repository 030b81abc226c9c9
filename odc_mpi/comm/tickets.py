"""Dynamic distribution of microbatches through shared counters, from which idle ranks draw their next microbatch.

A ticket is the right to process one item, identified by its position in a list that all ranks know. The lowest rank of
each node hosts a counter in an MPI window. A rank draws a ticket with a single MPI_Fetch_and_op: first from its own
node, until that node's share of the positions is used up, and then from the other nodes. A second counter on each node
counts the nodes that have run out of tickets, so that not every rank needs to ask all nodes.
"""

from collections.abc import Iterator

import torch

from odc_mpi.comm.windows.rma import Window
from odc_mpi.runtime.world import World

#: Elements of a node's window: number of positions drawn, and number of other nodes known to be out of tickets.
_DRAWN, _EMPTY = range(2)


class Tickets:
    """Shared counters from which ranks draw positions in a list known to all ranks. Construction is collective."""

    def __init__(self, world: World) -> None:
        self._world = world
        nodes = world.gather_objects(world.node)
        # Beginning with the next node, so that nodes that are out of tickets do not all ask the same one.
        self._others = [(world.node + i) % world.num_nodes for i in range(1, world.num_nodes)]
        # Among `size` consecutive positions, a node's positions are at the offsets that equal its ranks.
        self._offsets = [[rank for rank, other in enumerate(nodes) if other == node] for node in range(world.num_nodes)]
        self._window = Window(world, 2, torch.int64)
        world.on_close(self.close)
        world.wait_collective(world.comm.Ibarrier(), "setting the ticket counters to zero")

    def draw(self, count: int) -> Iterator[int]:
        """Yield positions from 0 to `count - 1` until none are left. Each position goes to only one rank. One-sided.

        A position is drawn whenever the iterator advances. `count` must be the same on all ranks.
        """
        while (position := self._next(self._world.node)) < count:
            yield position
        target = self._counter_rank(self._world.node)
        while (num_empty := self._num_empty(target)) < len(self._others):
            position = self._next(self._others[num_empty])
            if position < count:
                yield position
            else:
                # If this overwrites another rank's larger number, an empty node is asked again, which is harmless.
                with self._world.deadline("recording which nodes have tickets left", [target]):
                    self._window.atomic_store(target, _EMPTY, num_empty + 1)

    def reset(self) -> None:
        """Set the counters hosted by this rank, if any, to zero. One-sided.

        All ranks call this between `complete_gradients` and `publish_parameters`, while no rank is drawing.
        """
        target = self._counter_rank(self._world.node)
        if self._world.rank == target:
            # Atomic like the draws: where network cards do the addition, a plain store may stay in the CPU cache.
            with self._world.deadline("setting the ticket counters to zero", [target]):
                self._window.atomic_store(target, _DRAWN, 0)
                self._window.atomic_store(target, _EMPTY, 0)

    def close(self) -> None:
        """Free the counters. Collective. Idempotent."""
        if self._offsets:
            self._offsets = []
            with self._world.collective("freeing the ticket counters"):
                self._window.free()
            self._world.cancel_on_close(self.close)

    def _next(self, node: int) -> int:
        target, offsets = self._counter_rank(node), self._offsets[node]
        with self._world.deadline("drawing a ticket", [target]):
            num_drawn = self._window.fetch_and_add(target, _DRAWN, 1)
        cycle, i = divmod(num_drawn, len(offsets))
        return cycle * self._world.size + offsets[i]

    def _num_empty(self, target: int) -> int:
        with self._world.deadline("reading which nodes have tickets left", [target]):
            return self._window.atomic_read(target, _EMPTY)

    def _counter_rank(self, node: int) -> int:
        return self._offsets[node][0]

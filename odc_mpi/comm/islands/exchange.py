"""Exchange of gradients and parameters between islands (`comm.islands.islands`), for each column of ranks.

    minibatch              ranks fetch from and push to their island only
    flush                  when all pushes of the island have completed, each rank pushes its shard of the island's sums
                           to the owners in its column. Other islands may still compute
    gradients complete     each owner has the sum over all islands
    publish                each owner Puts its new parameters into the shards of the other islands

The result is that of sharding over all ranks. Between islands, a rank sends and receives its shards once per minibatch,
whatever the caches of its island hold.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch
from mpi4py import MPI
from typing_extensions import override

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.layout import FlatLayout
from odc_mpi.comm.reduce.accumulate import WindowGradientStore
from odc_mpi.comm.transport import Exchange
from odc_mpi.comm.windows.parameters import WindowParameters
from odc_mpi.comm.windows.rma import Message, Window, as_mpi_buffer, messages
from odc_mpi.runtime.world import World


class IslandExchange(Exchange):
    """The part of a transport that exchanges gradients and parameters between islands.

    The shards of the stores are those of an island. This class divides each of them into the shards of the owners in
    the column, of which this rank has one.

    Args:
        parameters: Parameter store of the island, in host memory.
        gradients: Gradient store of the island, in host memory.
        sums: Gradient store of the column, not allocated. Its shards are the sums over all islands.
    """

    def __init__(
        self,
        islands: Islands,
        parameters: WindowParameters,
        gradients: WindowGradientStore,
        sums: WindowGradientStore,
    ) -> None:
        self._islands, self._parameters, self._gradients, self._sums = islands, parameters, gradients, sums
        self._has_sent_frozen = False

    @override
    def plan(self, layouts: Sequence[FlatLayout]) -> int:
        super().plan(layouts)
        return self._sums.plan([self._column_layout(layout) for layout in layouts])

    @override
    def allocate(self) -> None:
        self._sums.allocate()
        column, [memory] = self._islands.column, self._parameters.mapped_memory()
        self._window = _ExposedWindow(column, memory.view(torch.uint8))
        starts = [self._parameters.shard(i).data_ptr() - memory.data_ptr() for i in range(len(self.layouts))]
        #: First byte of the shard of each array, by rank of the column.
        self._starts = column.gather_objects(starts)
        with self._islands.island.collective("duplicating the communicator"):
            self._comm = self._islands.island.comm.Dup()

    @override
    def parameter_shard(self, index: int) -> torch.Tensor:
        numel = self.layouts[index].shard_numel // self._islands.size
        return self._parameters.shard(index)[self._islands.index * numel :][:numel]

    @override
    def gradient_shard(self, index: int) -> torch.Tensor:
        return self._sums.shard(index)

    @override
    def bytes_per_minibatch(self) -> tuple[Counter[int], Counter[int]]:
        received, pushed = Counter[int](), Counter[int]()
        for index in self.trainable_numels:
            for other, rank in enumerate(self._islands.column_ranks):
                if other != self._islands.index:
                    received[rank] += self._owned(index, other)[1] * self._parameters.dtype_of(index).itemsize
                    pushed[rank] += self._owned(index, other)[1] * self._sums.dtype.itemsize
        return received, pushed

    @override
    def flush(self) -> None:
        """Wait until the gradients of the island are complete, and push them to their owners. Collective in islands."""
        self._islands.island.wait_collective(self._comm.Ibarrier(), f"synchronizing island {self._islands.index}")
        self._gradients.complete()
        for index, layout in enumerate(self._sums.layouts):
            if layout.trainable and layout.numel:
                self._sums.push(index, self._gradients.shard(index)[: layout.numel])
        self._sums.flush()

    @override
    def complete(self) -> None:
        self._sums.complete()
        # The owner clears the sums. Ranks of the island push again only after the parameters are published.
        for index in self.trainable_numels:
            self._gradients.shard(index).zero_()

    @override
    def publish(self) -> None:
        others = [rank for rank in range(self._islands.size) if rank != self._islands.index]
        with self._islands.column.deadline("publishing parameters to other islands", others):
            for index, layout in enumerate(self.layouts):
                if layout.trainable or not self._has_sent_frozen:
                    shard = as_mpi_buffer(self.parameter_shard(index).view(torch.uint8))
                    parts = chain.from_iterable(self._parts(index, rank) for rank in others)
                    self._window.put_messages(shard, parts)
            self._window.flush()
        self._has_sent_frozen = True

    @override
    def sync(self) -> None:
        self._sums.sync()
        self._window.sync()

    @override
    def mapped_memory(self) -> list[torch.Tensor]:
        return self._sums.mapped_memory()

    @override
    def free(self) -> None:
        self._comm.Free()
        self._window.free()
        self._sums.free()

    def _column_layout(self, layout: FlatLayout) -> FlatLayout:
        """Return the layout of this rank's shard of an array, divided among the ranks of the column."""
        start, stop = layout.owned(self._islands.island.rank)
        numel, size = stop - start, self._islands.size
        return replace(layout, ranges=(), numel=numel, num_owners=size, shard_numel=layout.shard_numel // size)

    def _owned(self, index: int, rank: int) -> tuple[int, int]:
        """Return the first element in the island's shard that a rank of the column owns, and the number of elements."""
        start, stop = self._sums.layouts[index].owned(rank)
        return start, stop - start

    def _parts(self, index: int, target: int) -> Iterator[Message]:
        """Return the messages with the parameters that this rank owns to a rank of the column, in bytes."""
        start, numel = self._owned(index, self._islands.index)
        itemsize = self._parameters.dtype_of(index).itemsize
        return messages(target, self._starts[target][index] + start * itemsize, numel * itemsize)


class _ExposedWindow(Window):
    """Window of existing memory, into which other ranks Put. Its `tensor` is empty. Construction is collective."""

    def __init__(self, world: World, memory: torch.Tensor) -> None:
        self._memory = MPI.memory.fromaddress(memory.data_ptr(), memory.nbytes)
        super().__init__(world, memory.numel(), torch.uint8)

    @override
    def _make(
        self, world: World, numel: int, dtype: torch.dtype, info: MPI.Info
    ) -> tuple[list[MPI.Win], dict[int, torch.Tensor]]:
        win = MPI.Win.Create(self._memory, dtype.itemsize, MPI.INFO_NULL, world.comm)
        return [win], {world.rank: torch.empty(0, dtype=dtype)}

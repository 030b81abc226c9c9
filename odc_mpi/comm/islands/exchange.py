"""Exchange of gradients and parameters between islands (`comm.islands.islands`), within each column of ranks.

    minibatch     ranks fetch from and push to ranks in their own island only
    finish        a rank announces that it will push no more gradients of an array. When all ranks in the island have
                  done this, each pushes its shard of the sum to the owners in its column, in its next finish or flush
    flush         finish the remaining arrays, wait for the other ranks in the island, and complete the pushes to owners
    complete      make the sums over all islands available to the owners, and zero those of the island
    publish       each owner Puts its new parameters, the first time also frozen ones, into the shards of other islands

The result is the same as with sharding over all ranks, up to the order of the sums.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from time import perf_counter

import numpy as np
import torch
from mpi4py import MPI
from typing_extensions import override

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.layout import FlatLayout
from odc_mpi.comm.reduce.accumulate import WindowGradientStore
from odc_mpi.comm.traffic import FETCHED, LOCATIONS, PUSHED, Traffic
from odc_mpi.comm.transport import ShardStorage
from odc_mpi.comm.windows.parameters import WindowParameters
from odc_mpi.comm.windows.rma import Message, Window, WindowParts, as_mpi_buffer, messages
from odc_mpi.comm.work import Work
from odc_mpi.runtime.deadline import wait_until
from odc_mpi.runtime.world import World


class IslandExchange(ShardStorage):
    """Component of a transport that exchanges gradients and parameters between islands.

    The ranks in this rank's column (see `Islands`) hold the same shards, and each owns an equal part of every shard.

    Args:
        parameters: The island's parameter store, in host memory.
        gradients: The island's gradient store, in host memory.
        sums: The column's gradient store, not yet allocated. Its shards receive the sums over all islands.

    Attributes:
        wait_s: Total time that this rank has spent in `flush` and `publish`, in seconds.
    """

    def __init__(
        self,
        islands: Islands,
        parameters: WindowParameters,
        gradients: WindowGradientStore,
        sums: WindowGradientStore,
    ) -> None:
        self._islands, self._parameters, self._gradients, self._sums = islands, parameters, gradients, sums
        self.traffic = Traffic()
        self.wait_s = 0.0
        self._has_sent_frozen = False
        self._num_minibatches = 0
        # Indices of the arrays that this rank has not yet finished, and of those not yet pushed, in this minibatch.
        self._unfinished: set[int] = set()
        self._unpushed: set[int] = set()

    @override
    def plan(self, layouts: Sequence[FlatLayout]) -> int:
        super().plan(layouts)
        num_bytes = self._sums.plan([self._column_layout(layout) for layout in layouts])
        self._start_minibatch()
        return num_bytes

    @override
    def allocate(self) -> None:
        self._sums.allocate()
        column, [memory] = self._islands.column, self._parameters.mapped_memory()
        self._window = _ExposedWindow(column, memory.view(torch.uint8))
        starts = [self._parameters.shard(i).data_ptr() - memory.data_ptr() for i in range(len(self.layouts))]
        #: First byte of the shard of each array, by rank in the column.
        self._starts = column.gather_objects(starts)
        # For each array, how often ranks in the island have finished it.
        self._counters = Window(self._islands.island, len(self.layouts), torch.int64)
        self._counts = self._counters.tensor.numpy()

    def parameter_shard(self, index: int) -> torch.Tensor:
        """Return the parameters of array `index` that this rank owns, without copying them."""
        numel = self.layouts[index].shard_numel // self._islands.size
        return self._parameters.shard(index)[self._islands.index * numel :][:numel]

    def gradient_shard(self, index: int) -> torch.Tensor:
        """Return the gradients of `parameter_shard(index)`, summed over all islands, without copying them."""
        return self._sums.shard(index)

    @cached_property
    def bytes_per_minibatch(self) -> np.ndarray:
        """Bytes of parameters received from other islands, then of gradients pushed to them, by `LOCATIONS`."""
        num_bytes = np.zeros((2, len(LOCATIONS)), dtype=np.int64)
        for index in self.trainable_numels:
            for other in set(range(self._islands.size)) - {self._islands.index}:
                location, numel = int(other not in self._islands.column.node_ranks), self._owned(index, other)[1]
                num_bytes[FETCHED, location] += numel * self._parameters.dtype_of(index).itemsize
                num_bytes[PUSHED, location] += numel * self._sums.dtype.itemsize
        return num_bytes

    def finish(self, indices: Iterable[int]) -> Work:
        """Announce that this rank will push no more gradients of the given arrays in this minibatch. One-sided.

        For arrays that all ranks in the island have finished, this also pushes this rank's shards of the sums.
        `flush` finishes the remaining arrays. The returned handle is already complete.
        """
        self._finish(self._unfinished.intersection(indices))
        return Work()

    @override
    def flush(self) -> None:
        """Wait until this island's ranks have pushed their gradients, and push the sums to their owners. One-sided."""
        began = perf_counter()
        self._finish(self._unfinished)
        island, what = self._islands.island, f"waiting for the other ranks of island {self._islands.index}"
        island.set_status(what)
        with island.deadline(what):
            wait_until(self._push_complete_arrays, island.progress.poke)
        self._sums.flush()
        self.wait_s += perf_counter() - began

    @override
    def complete(self) -> None:
        self._sums.complete()
        # Ranks in the island push again only after the parameters are published.
        for index in self.trainable_numels:
            self._gradients.shard(index).zero_()
        self._start_minibatch()

    def _start_minibatch(self) -> None:
        self._num_minibatches += 1
        self.traffic.moved.append(self.bytes_per_minibatch)
        self._unfinished, self._unpushed = set(self.trainable_numels), set(self.trainable_numels)

    def _finish(self, indices: set[int]) -> None:
        if indices:
            first, last = min(indices), max(indices)
            increments = np.zeros(last + 1 - first, dtype=np.int64)
            increments[[index - first for index in indices]] = 1
            with self._islands.island.deadline("flushing gradients"):
                self._gradients.flush()
                for rank in range(self._islands.island.size):
                    self._counters.accumulate_messages(increments, messages(rank, first, len(increments)))
                self._counters.flush()
            self._unfinished = self._unfinished - indices
        self._push_complete_arrays()

    def _push_complete_arrays(self) -> bool:
        """Push the arrays that all ranks in the island have finished. Return True if none are left. One-sided."""
        self._counters.sync()
        num_pushes = self._num_minibatches * self._islands.island.size
        complete = {index for index in self._unpushed if self._counts[index] == num_pushes}
        if complete:
            self._gradients.add_received()
        for index in sorted(complete):
            if numel := self._sums.layouts[index].numel:
                self._sums.push(index, self._gradients.shard(index)[:numel])
        self._unpushed -= complete
        return not self._unpushed

    @override
    def publish(self) -> None:
        began = perf_counter()
        others = [rank for rank in range(self._islands.size) if rank != self._islands.index]
        with self._islands.column.deadline("publishing parameters to other islands", others):
            for index, layout in enumerate(self.layouts):
                if layout.trainable or not self._has_sent_frozen:
                    shard = as_mpi_buffer(self.parameter_shard(index).view(torch.uint8))
                    messages = chain.from_iterable(self._parts(index, rank) for rank in others)
                    self._window.put_messages(shard, messages)
            self._window.flush()
        self._has_sent_frozen = True
        self.wait_s += perf_counter() - began

    @override
    def sync(self) -> None:
        self._sums.sync()
        self._window.sync()

    @override
    def mapped_memory(self) -> list[torch.Tensor]:
        return self._sums.mapped_memory()

    @override
    def free(self) -> None:
        del self._counts
        self._counters.free()
        self._window.free()
        self._sums.free()

    def _column_layout(self, layout: FlatLayout) -> FlatLayout:
        start, stop = layout.owned(self._islands.island.rank)
        numel, size = stop - start, self._islands.size
        return replace(layout, ranges=(), numel=numel, num_owners=size, shard_numel=layout.shard_numel // size)

    def _owned(self, index: int, rank: int) -> tuple[int, int]:
        """Return the first element of this rank's shard that a rank in the column owns, and the number of elements."""
        start, stop = self._sums.layouts[index].owned(rank)
        return start, stop - start

    def _parts(self, index: int, target: int) -> Iterator[Message]:
        """Return the messages, in bytes, that send the parameters owned by this rank to a rank in the column."""
        start, numel = self._owned(index, self._islands.index)
        itemsize = self._parameters.dtype_of(index).itemsize
        return messages(target, self._starts[target][index] + start * itemsize, numel * itemsize)


class _ExposedWindow(Window):
    """Window over existing memory, into which other ranks Put. Construction is collective. Its `tensor` is empty."""

    def __init__(self, world: World, memory: torch.Tensor) -> None:
        self._memory = MPI.memory.fromaddress(memory.data_ptr(), memory.nbytes)
        super().__init__(world, memory.numel(), torch.uint8)

    @override
    def _make(self, world: World, numel: int, dtype: torch.dtype, info: MPI.Info) -> WindowParts:
        win = MPI.Win.Create(self._memory, dtype.itemsize, MPI.INFO_NULL, world.comm)
        return [win], {world.rank: torch.empty(0, dtype=dtype)}

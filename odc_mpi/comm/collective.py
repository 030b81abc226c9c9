"""Baseline parameter and gradient stores that use MPI collectives and shard like FSDP and ZeRO-3.

    fetch    all-gather of a unit (parameters fetched together), before its forward and again before its backward pass
    push     reduce-scatter of a unit's full gradient; each rank adds its part of the sum to its shard

All ranks must make the same calls in the same order, so they wait for each other at every unit. A rank with fewer
microbatches than others runs dummy microbatches whose loss is zero.

Note: the same order on all ranks
    The sequence of fetches depends only on the control flow of the model (`shard.units.unsharded`). No unit is
    prefetched. A push covers the full array, even if some parameters in the array have no gradient. As with FSDP,
    data-dependent control flow must not make a rank skip a unit. Each array has one communicator for gathers and one
    for reductions. If a rank fetches or pushes a different array, other ranks wait until the deadline and print the
    status of that rank. With a single communicator, MPI would silently mix up arrays of equal size.
"""

import functools

import numpy as np
import torch
from mpi4py import MPI
from typing_extensions import override

from odc_mpi.comm.buffers import BufferPool
from odc_mpi.comm.group import Group
from odc_mpi.comm.transport import GradientStore, ParameterStore, PrivateShards
from odc_mpi.comm.windows.rma import COPY_DTYPES, MPI_DTYPES
from odc_mpi.comm.work import FetchWork, Work
from odc_mpi.runtime.world import World

#: Maximum number of communicators per store; a store with more arrays reuses them. MPICH allows about 2000 in total.
MAX_COMMUNICATORS = 400


class CollectiveCommunicator:
    """Blocking, busy-waiting collectives on contiguous host tensors, for benchmarks. Construction is collective."""

    def __init__(self, world: World) -> None:
        self._world = world
        with world.deadline("duplicating the communicator"):
            self._comm = world.comm.Dup()

    def barrier(self) -> None:
        """Synchronize all ranks so that they return at nearly the same time. Collective."""
        # The first wait leaves the core to ranks that are still busy, and the second is short.
        self._world.wait(self._comm.Ibarrier(), "waiting at a barrier")
        with self._world.deadline("waiting at a barrier"):
            self._comm.Barrier()

    def all_gather(self, shard: torch.Tensor, gathered: torch.Tensor) -> None:
        """Concatenate the shards of all ranks, each `[n]` of any dtype, into `gathered`, `[size * n]`. Collective."""
        with self._world.deadline("gathering an array from all ranks"):
            self._comm.Allgather(_as_bytes(shard), _as_bytes(gathered))

    def reduce_scatter(self, gradient: torch.Tensor, shard: torch.Tensor) -> None:
        """Sum `gradient` over all ranks and write this rank's part of the sum to `shard`. Collective.

        `gradient`, `[size * n]`, is of dtype float32, float64 or int64. `shard`, `[n]`, must have the same dtype.
        """
        with self._world.deadline("reducing an array over all ranks"):
            self._comm.Reduce_scatter_block(gradient.numpy(), shard.numpy())

    def free(self) -> None:
        """Free the communicator. Collective."""
        self._comm.Free()


class _CollectiveStore(PrivateShards):
    """Shards in private memory, with a communicator per array.

    Arrays share communicators if there are more than `MAX_COMMUNICATORS`. Only the main thread may call a store based
    on this class, because with two threads, the order of calls could differ between ranks.
    """

    def __init__(self, world: World, group: Group, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._world, self._group = world, group
        self._comms: list[MPI.Intracomm] = []

    @override
    def allocate(self) -> None:
        with self._world.collective("duplicating the communicator"):
            self._comms = [self._world.comm.Dup() for _ in self.layouts[:MAX_COMMUNICATORS]]

    @override
    def free(self) -> None:
        super().free()
        while self._comms:
            self._comms.pop().Free()

    def comm_of(self, index: int) -> MPI.Intracomm:
        """Return the communicator of an array, and increment the group's `num_collectives`."""
        self._group.num_collectives += 1
        return self._comms[index % len(self._comms)]

    def _wait(self, request: MPI.Request, what: str, index: int, _memory: torch.Tensor) -> None:
        # The work handle holds `_memory` until here: MPI has no reference to it.
        self._world.wait_collective(request, f"{what} unit {self.layouts[index].name}")


class CollectiveParameters(_CollectiveStore, ParameterStore):
    """Parameter store that keeps its shards in private memory and fetches arrays with an all-gather.

    Fetches are collective, and so are all operations that fetch, such as forward and backward passes and `state_dict`.
    """

    @override
    def allocate(self) -> None:
        super().allocate()
        shards = (torch.zeros(layout.shard_numel, dtype=layout.dtype or self.dtype) for layout in self.layouts)
        self._shards = dict(enumerate(shards))

    @override
    def fetch(self, index: int) -> FetchWork:
        """Start gathering array `index` from all ranks. Collective. The handle's `wait` method returns the array."""
        layout = self.layouts[index]
        # The last shards may extend beyond the end of the array.
        buffer = self.buffers.acquire(self._group.size * layout.shard_numel, self.dtype_of(index))
        return FetchWork(buffer[: layout.numel], self.start_fetch(index, buffer))

    @override
    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        """Start gathering array `index` from all ranks into `buffer`, `[size * shard_numel]`. Collective."""
        shard, element = self._shards[index], COPY_DTYPES[self.dtype_of(index).itemsize]
        assert buffer.numel() == self._group.size * shard.numel()
        request = self.comm_of(index).Iallgather([_as_bytes(shard), element], [_as_bytes(buffer), element])
        return Work(functools.partial(self._wait, request, "gathering", index, buffer))


class CollectiveGradients(_CollectiveStore, GradientStore):
    """Gradient store that keeps its shards in private memory and pushes gradients with a reduce-scatter."""

    def __init__(self, world: World, group: Group, dtype: torch.dtype) -> None:
        super().__init__(world, group, dtype)
        self._reduces: list[Work] = []
        self._results = BufferPool()

    @override
    def allocate(self) -> None:
        super().allocate()
        self._shards = {index: torch.zeros(numel, dtype=self.dtype) for index, numel in self.trainable_numels.items()}

    @override
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        """Start summing a gradient over all ranks. Each rank then adds its part of the sum to its shard. Collective.

        `gradient` begins at element `start` of array `index`. Elements that a rank does not provide count as zero.
        """
        layout, element = self.layouts[index], MPI_DTYPES[self.dtype]
        if gradient.numel() != layout.numel:
            stop = start + gradient.numel()
            gradient = torch.nn.functional.pad(gradient, (start, layout.numel - stop))
        counts = [stop - first for first, stop in map(layout.owned, range(self._group.size))]
        result = self._results.acquire(counts[self._group.rank], self.dtype)
        send, receive = [gradient.numpy(), element], [result.numpy(), element]
        request = self.comm_of(index).Ireduce_scatter(send, receive, counts, MPI.SUM)
        reduce = Work(functools.partial(self._complete, index, request, result, gradient))
        self._reduces.append(reduce)
        return reduce

    @override
    def flush(self) -> None:
        for reduce in self._reduces:
            reduce.wait()
        self._reduces.clear()

    @override
    def free(self) -> None:
        super().free()
        self._results.clear()

    def _complete(self, index: int, request: MPI.Request, result: torch.Tensor, gradient: torch.Tensor) -> None:
        self._wait(request, "reducing the gradient of", index, gradient)
        self._shards[index][: result.numel()] += result
        self._results.release(result)


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()

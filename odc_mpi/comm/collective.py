"""The seam over MPI's collectives: fully sharded data parallel training as FSDP and ZeRO-3 do it, for comparison.

    fetch     an all-gather of the unit: before its forward, and again before its backward
    push      a reduce-scatter of its whole gradient, added to what this rank's shard holds already
    A, N, B   as over windows

Every rank takes part in every call, in the same order: exactly what a sharded model does without over windows. Ranks
wait for each other at each unit, and one with fewer microbatches than others has to run more, with a loss of zero.

Note: the same order on all ranks
    Which units a rank fetches follows from the model's control flow alone: nothing is fetched ahead, no unit but the
    root outlives its forward or backward, and each microbatch begins with none (`shard.units.collective`). A push
    covers the whole array, whichever of its parameters got a gradient. Models whose control flow over units depends on
    data, so that some rank leaves out a unit, do not work here, as they do not with FSDP. Each array has a communicator
    for gathers and one for reductions, so that a rank that does something else is waited for until the deadline, which
    says what it is doing; with one communicator for all, arrays of one size would silently be taken for each other.

`CollectiveCommunicator` has the bare calls, blocking, which the benchmark times.
"""

import functools
from collections import deque

import numpy as np
import torch
from mpi4py import MPI
from typing_extensions import override

from odc_mpi.comm.buffers import BufferPool
from odc_mpi.comm.shard_storage import ShardStorage
from odc_mpi.comm.transport import GradientStore, Group, ParameterStore
from odc_mpi.comm.windows.rma import MPI_DTYPES
from odc_mpi.comm.work import DeferredWork, FetchWork, Work
from odc_mpi.runtime.world import World

#: How elements that are only moved are described: by their size, since MPI knows no bf16. (As single bytes, a shard's
#: count would leave the C int of many libraries at 2 GiB.)
_BYTE_DTYPES = {2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}
#: Arrays beyond this number share communicators with others; MPICH has about 2000 in all.
MAX_COMMUNICATORS = 400


class CollectiveCommunicator:
    """MPI's gather and reduce of an array of equal shards. Making and freeing one is collective.

    The calls block, and spin in the library: that is how it is fastest.

    Args:
        world: The ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        with world.deadline("duplicating the communicator"):
            self._comm = world.comm.Dup()

    def barrier(self) -> None:
        """Meet, and leave as close together as MPI can. Collective."""
        # First in a way that leaves the core to ranks that are still busy; the last step then is short.
        self._world.wait(self._comm.Ibarrier(), "meeting at a barrier")
        with self._world.deadline("meeting at a barrier"):
            self._comm.Barrier()

    def all_gather(self, shard: torch.Tensor, whole: torch.Tensor) -> None:
        """Put the shards of all ranks one after the other. Collective.

        Args:
            shard: `[n]` of any dtype, contiguous, on the host.
            whole: `[size * n]` of the same; overwritten.
        """
        with self._world.deadline("gathering an array from all ranks"):
            self._comm.Allgather(_as_bytes(shard), _as_bytes(whole))

    def reduce_scatter(self, gradient: torch.Tensor, shard: torch.Tensor) -> None:
        """Sum over all ranks, and keep this rank's shard. Collective.

        Args:
            gradient: `[size * n]` float32 or float64, contiguous, on the host.
            shard: `[n]` of the same; overwritten.
        """
        element = MPI_DTYPES[gradient.dtype]
        with self._world.deadline("reducing an array over all ranks"):
            self._comm.Reduce_scatter_block([gradient.numpy(), element], [shard.numpy(), element], MPI.SUM)

    def free(self) -> None:
        """Free the communicator. Collective; a second call does nothing."""
        if self._comm != MPI.COMM_NULL:
            self._comm.Free()


class CollectiveParameters(ShardStorage, ParameterStore):
    """Parameters in private memory, fetched with an all-gather. See the module's docstring. Making one is local.

    Fetches are collective, and so is whatever makes them: a forward, a backward, `state_dict`. Only the main thread may
    call it: from two threads the order would be a matter of chance.

    Args:
        world: The ranks that share every array.
        group: Of these ranks; counts the collectives.
        dtype: Of the parameters.
    """

    def __init__(self, world: World, group: Group, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._world, self._group, self._comms = world, group, _Communicators(world, group)
        self._shards: list[torch.Tensor] = []

    @override
    def allocate(self) -> None:
        self._comms.create(len(self.layouts))
        self._shards = [torch.zeros(layout.shard_numel, dtype=layout.dtype or self.dtype) for layout in self.layouts]

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._shards[index]

    def fetch(self, index: int) -> FetchWork:
        """Start to gather a whole array. Collective."""
        layout = self.layouts[index]
        # The last shards reach beyond the array's end.
        whole = self.buffers.acquire(self._group.size * layout.shard_numel, self.dtype_of(index))
        return FetchWork(whole[: layout.numel], self.start_fetch(index, whole))

    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        """Start to gather all shards into `buffer`, `[size * shard_numel]` of `dtype`. Collective."""
        shard, element = self._shards[index], _BYTE_DTYPES[self.dtype_of(index).itemsize]
        assert buffer.numel() == self._group.size * shard.numel()
        request = self._comms.for_next(index).Iallgather([_as_bytes(shard), element], [_as_bytes(buffer), element])
        return DeferredWork(functools.partial(self._complete, index, request, buffer))

    @override
    def free(self) -> None:
        self._comms.free()
        self._shards = []

    def _complete(self, index: int, request: MPI.Request, _buffer: torch.Tensor) -> None:
        """Wait for a gather, whose buffer is kept until then: MPI holds no reference to what it fills."""
        self._world.wait_collective(request, f"gathering unit {self.layouts[index].name}")


class CollectiveGradients(ShardStorage, GradientStore):
    """Gradients in private memory, pushed with a reduce-scatter. See the module's docstring. Making one is local.

    Args:
        world: The ranks that share every array.
        group: Of these ranks; counts the collectives.
        dtype: Of the gradients.
    """

    def __init__(self, world: World, group: Group, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._world, self._group, self._comms = world, group, _Communicators(world, group)
        self._shards: dict[int, torch.Tensor] = {}
        self._reduces: deque[DeferredWork] = deque()
        self._results = BufferPool()

    @override
    def allocate(self) -> None:
        self._comms.create(len(self.layouts))
        self._shards = {index: torch.zeros(numel, dtype=self.dtype) for index, numel in self.trainable_numels.items()}

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._shards[index]

    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        """Start to sum a gradient over all ranks and to add it into its owners' shards. Collective.

        Args:
            index: As for any store, the same on every rank.
            gradient: As for any store; what it does not cover counts as zero.
            start: As for any store; may differ between ranks.
        """
        layout, element = self.layouts[index], MPI_DTYPES[self.dtype]
        if gradient.numel() != layout.numel:
            stop = start + gradient.numel()
            gradient = torch.nn.functional.pad(gradient, (start, layout.numel - stop))
        counts = [stop - first for first, stop in map(layout.owned, range(self._group.size))]
        own = self._results.acquire(counts[self._group.rank], self.dtype)
        given, result = [gradient.numpy(), element], [own.numpy(), element]
        request = self._comms.for_next(index).Ireduce_scatter(given, result, counts, MPI.SUM)
        reduce = DeferredWork(functools.partial(self._complete, index, request, own, gradient))
        while self._reduces and self._reduces[0].is_done:
            self._reduces.popleft()
        self._reduces.append(reduce)
        return reduce

    @override
    def flush(self) -> None:
        while self._reduces:
            self._reduces.popleft().wait()

    @override
    def free(self) -> None:
        self._comms.free()
        self._shards = {}
        self._results.clear()

    def _complete(self, index: int, request: MPI.Request, local: torch.Tensor, _gradient: torch.Tensor) -> None:
        """Add a sum, once it is there, to this rank's shard. The gradient is kept until then, as a gather's buffer."""
        self._world.wait_collective(request, f"reducing the gradient of unit {self.layouts[index].name}")
        self._shards[index][: local.numel()] += local
        self._results.release(local)


class _Communicators:
    """A communicator for the collectives of each array, as far as there are enough."""

    def __init__(self, world: World, group: Group) -> None:
        self._world, self._group = world, group
        self._comms: list[MPI.Intracomm] = []

    def create(self, num_arrays: int) -> None:
        """Make them. Collective."""
        with self._world.collective("duplicating the communicator"):
            self._comms = [self._world.comm.Dup() for _ in range(min(num_arrays, MAX_COMMUNICATORS))]

    def for_next(self, index: int) -> MPI.Intracomm:
        """Count an operation on an array, and return the communicator for it."""
        self._group.num_collectives += 1
        return self._comms[index % len(self._comms)]

    def free(self) -> None:
        """Free all. Collective; a second call does nothing."""
        while self._comms:
            self._comms.pop().Free()


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()

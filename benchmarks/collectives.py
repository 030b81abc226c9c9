"""MPI collectives on host memory, as sharded training with FSDP or ZeRO-3 uses them, for comparison in benchmarks."""

import numpy as np
import torch
from mpi4py import MPI

from odc_mpi.runtime.world import World


class CollectiveCommunicator:
    """Collectives on contiguous host tensors. Construction is collective.

    `all_gather` and `reduce_scatter` block and spin while they wait. `start_all_gather` and `start_reduce_scatter` do
    not wait. Their tensors must not be used until `World.wait_collective` has waited for the returned request.

    A full array, `[size * n]`, consists of the shards of all ranks, each `[n]`. Shards to gather may have any dtype.
    Gradients to reduce, and the shard for their sum, must have the same dtype: float32, float64 or int64.
    """

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

    def all_gather(self, shard: torch.Tensor, full: torch.Tensor) -> None:
        """Concatenate the shards of all ranks into `full`. Collective."""
        with self._world.deadline("gathering an array from all ranks"):
            self._comm.Allgather(_as_bytes(shard), _as_bytes(full))

    def reduce_scatter(self, gradient: torch.Tensor, shard: torch.Tensor) -> None:
        """Sum the full array `gradient` over all ranks, and write this rank's part to `shard`. Collective."""
        with self._world.deadline("reducing an array over all ranks"):
            self._comm.Reduce_scatter_block(gradient.numpy(), shard.numpy())

    def start_all_gather(self, shard: torch.Tensor, full: torch.Tensor) -> MPI.Request:
        """Like `all_gather`, but without waiting. Collective."""
        return self._comm.Iallgather(_as_bytes(shard), _as_bytes(full))

    def start_reduce_scatter(self, gradient: torch.Tensor, shard: torch.Tensor) -> MPI.Request:
        """Like `reduce_scatter`, but without waiting. Collective."""
        return self._comm.Ireduce_scatter_block(gradient.numpy(), shard.numpy())

    def free(self) -> None:
        """Free the communicator. Collective."""
        with self._world.collective("freeing the communicator"):
            self._comm.Free()


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()

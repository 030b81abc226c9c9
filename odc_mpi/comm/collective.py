"""The collectives over flat arrays that one-sided communication replaces, as MPI has them, for comparison.

Every rank takes part in every call, in the same order: exactly what a sharded model here does without.
"""

import torch
from mpi4py import MPI

from odc_mpi.comm.rma import MPI_DTYPES
from odc_mpi.comm.world import World


class Collectives:
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
            self._comm.Allgather(shard.view(torch.uint8).numpy(), whole.view(torch.uint8).numpy())

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

"""The ordering points over MPI: how ranks meet at A, N and B, whatever moves parameters and gradients in between.

    A, N    an all-gather of a few numbers
    B       a barrier

Each is a non-blocking collective that is polled with sleeps in between, in a meeting that names a late rank.
"""

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from odc_mpi.runtime.world import World


class OrderingPoints:
    """Where all ranks meet. Making one and every method are collective.

    Args:
        world: The ranks.
        meanwhile: Called again and again while this rank waits.
    """

    def __init__(self, world: World, meanwhile: Callable[[], object] = lambda: None) -> None:
        self._world = world
        self._meanwhile = meanwhile
        # One for each point: a rank that leaves one out waits at the next, where its deadline names it, instead of
        # taking the others' numbers for what they are not.
        with world.meeting("duplicating the communicator"):
            self._at_a, self._at_n, self._at_b = (world.comm.Dup() for _ in range(3))

    def gradients_complete(self, report: np.ndarray) -> np.ndarray:
        """Meet at A: give every rank all reports, `[size, k]` float64 from `[k]` each. Collective."""
        return self._allgather(self._at_a, report, "meeting at point A, gradients complete")

    def norm(self, values: np.ndarray) -> np.ndarray:
        """Meet at N: sum `[k]` float64 over all ranks, to the last bit the same on each. Collective."""
        # An all-gather summed here: some libraries' all-reduce adds in an order that differs from rank to rank.
        return self._allgather(self._at_n, values, "meeting at point N, norm").sum(axis=0)

    def parameters_published(self) -> None:
        """Meet at B. Collective."""
        self._world.meet(self._at_b.Ibarrier(), "meeting at point B, parameters published")

    def free(self) -> None:
        """Free the communicators. Collective, within a meeting of the caller's."""
        for comm in (self._at_a, self._at_n, self._at_b):
            comm.Free()

    def _allgather(self, comm: MPI.Intracomm, values: np.ndarray, what: str) -> np.ndarray:
        values = np.ascontiguousarray(values, dtype=np.float64)
        everyone = np.empty((self._world.size, values.size))
        self._world.meet(comm.Iallgather(values, everyone), what, meanwhile=self._meanwhile)
        return everyone

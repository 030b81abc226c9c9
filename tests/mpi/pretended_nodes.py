"""Ranks of one host that `World` finds on several nodes: two on each, or fewer on the last."""

from mpi4py import MPI

from odc_mpi.runtime.world import World


class _Pairs(MPI.Intracomm):
    def Split_type(self, kind, key=0, info=None):  # noqa: N802
        return self.Split(self.rank // 2)


def on_pretended_nodes(world):
    """The same ranks as a world of nodes of two ranks, which closes with `world`. Collective."""
    nodes = World(_Pairs(world.comm), job=world.job)
    world.on_close(nodes.close)
    return nodes

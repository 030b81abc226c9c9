"""Ranks of one host that `World` finds on several nodes: one to three on each, or fewer on the last."""

from mpi4py import MPI

from odc_mpi.runtime.world import World


class _Singles(MPI.Intracomm):
    def Split_type(self, kind, key=0, info=None):  # noqa: N802
        return self.Split(self.rank)


class _Pairs(MPI.Intracomm):
    def Split_type(self, kind, key=0, info=None):  # noqa: N802
        return self.Split(self.rank // 2)


class _Threes(MPI.Intracomm):
    """The node of a rank does not depend on the communicator."""

    def Split_type(self, kind, key=0, info=None):  # noqa: N802
        return self.Split(MPI.COMM_WORLD.rank // 3)


def on_pretended_nodes(world):
    """The same ranks as a world of nodes of two ranks, or of one if there are two; closes with `world`. Collective."""
    nodes = World((_Pairs if world.size > 2 else _Singles)(world.comm), job=world.job)
    world.on_close(nodes.close)
    return nodes


def on_nodes_of_three(world, monkeypatch):
    """The same ranks as a world of nodes of three ranks; so are worlds that split it. Collective."""
    find_ranks = World._find_ranks
    monkeypatch.setattr(World, "_find_ranks", lambda self, comm: find_ranks(self, _Threes(comm)))
    nodes = World(world.comm, job=world.job)
    world.on_close(nodes.close)
    return nodes

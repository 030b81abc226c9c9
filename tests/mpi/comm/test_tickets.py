"""Tickets: every position once, whichever ranks are slow, late or idle, and separate minibatches."""

import time

import numpy as np
import pytest
from mpi4py import MPI

from odc_mpi.comm.tickets import Tickets

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


@pytest.fixture
def tickets(world):
    made = Tickets(world)
    yield made
    world.gather_objects(None)
    made.close()


def published(world):
    """Synchronize as for published parameters."""
    world.wait_collective(world.comm.Ibarrier(), "synchronizing at parameters_published of a test")


def test_a_position_is_drawn_when_it_is_asked_for(world, tickets):
    """A rank that stops asking leaves the rest to the others."""
    published(world)
    drawing = tickets.draw(2 * world.size)
    drawn = [next(drawing)] if world.rank else []
    world.gather_objects(None)
    if world.rank == 0:
        drawn = list(drawing)
    everyone = world.gather_objects(drawn)
    assert sorted(position for drawn in everyone for position in drawn) == list(range(2 * world.size))
    assert all(drawn == sorted(drawn) for drawn in everyone), "a rank gets positions in the order of the list"
    assert len(everyone[0]) == world.size + 1


class Nodes:
    """A world whose ranks claim to be on several nodes."""

    def __init__(self, world, nodes):
        self._world, self._nodes = world, nodes
        self.node, self.num_nodes = nodes[world.rank], max(nodes) + 1

    def __getattr__(self, name):
        return getattr(self._world, name)


@pytest.mark.parametrize(
    "nodes",
    [[0, 0, 0, 0], *(pytest.param(nodes, marks=pytest.mark.sizes(3, 4)) for nodes in ([0, 1, 1, 1], [0, 1, 2, 2]))],
    ids=str,
)
def test_every_position_once_through_hundreds_of_minibatches(world, nodes):
    """On one or several nodes. In some a rank is slow, in some one comes late, and then draws nothing or little."""
    rng = np.random.default_rng(5)  # the same on every rank
    made = Tickets(Nodes(world, nodes[: world.size]))
    drew_nothing = 0
    for minibatch in range(600):
        count, odd = int(rng.integers(0, 5 * world.size)), int(rng.integers(world.size))
        if minibatch % 50 == 0 and world.rank == odd:
            time.sleep(3e-3)  # the others have drawn all by then
        drawn = []
        for position in made.draw(count):
            drawn.append(position)
            if minibatch % 50 == 25 and world.rank == odd:
                time.sleep(1e-3)
        total = np.zeros(max(1, count), dtype=np.int64)
        total[drawn] += 1
        assert total[drawn].sum() == len(drawn), "one rank got a position twice"
        world.comm.Allreduce(MPI.IN_PLACE, total)
        assert (total[:count] == 1).all(), f"minibatch {minibatch}: {total.tolist()}"
        drew_nothing += bool(count) and not drawn
        made.reset()
        published(world)
    assert world.size == 1 or sum(world.gather_objects(drew_nothing)) > 0, (
        "every rank drew a position: drawing none was not tried"
    )
    made.close()


@pytest.mark.mpi(min_size=2)
def test_a_node_asks_another_once_whether_it_has_any_left(world):
    """The second rank of a node believes the first: it asks no other node at all."""
    made = Tickets(Nodes(world, [0, *[1] * (world.size - 1)]))
    targets = []
    fetch = made._window.fetch_and_add
    made._window.fetch_and_add = lambda target, *rest: targets.append(target) or fetch(target, *rest)
    for _ in range(2):  # the second time as the first: the reset clears the cached counts
        targets.clear()
        published(world)
        if world.rank == 0:
            assert len(list(made.draw(world.size))) == world.size
        published(world)
        if world.rank == 1:
            assert list(made.draw(world.size)) == []
        published(world)
        if world.rank > 1:
            assert list(made.draw(world.size)) == []
        published(world)
        assert targets == {0: [0, 0, *[1] * world.size], 1: [1, 0]}.get(world.rank, [1])
        made.reset()
    made.close()


def test_the_counter_has_64_bits(world, tickets):
    if world.rank == 0:
        tickets._window.atomic_store(0, 0, 1 << 40)
        assert tickets._window.atomic_read(0, 0) == 1 << 40
    published(world)
    assert list(tickets.draw(100)) == []
    world.gather_objects(None)
    assert tickets._window.fetch_and_add(0, 0, 0) == (1 << 40) + world.size

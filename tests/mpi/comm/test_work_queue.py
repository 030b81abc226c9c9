"""The work queue: each item to one rank, with its content, however slow ranks or full stores are."""

import time

import numpy as np
import pytest
from mpi4py import MPI

from odc_mpi.comm.work_queue import WorkQueue

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]

COUNT = 12


def content(minibatch, piece):
    return np.random.default_rng((minibatch, piece)).bytes(40 + 100 * (piece % 5))


@pytest.fixture
def exchange(world, request):
    made = WorkQueue(world, COUNT, request.param)
    yield made
    world.gather_objects(None)
    made.close()
    made.close()


def published(world):
    world.wait_collective(world.comm.Ibarrier(), "meeting at point B of a test")


# Space for all; for one or two items at a time, so that segments are reused; for none.
@pytest.mark.parametrize("exchange", [COUNT * 600, 600, 0], indirect=True)
def test_every_item_once_through_thousands_of_steps(world, exchange, request):
    room = request.node.callspec.params["exchange"]
    draws = np.random.default_rng(5)  # the same on every rank
    idle = np.random.default_rng(world.rank)
    num_from_others = 0
    steps = 700
    for minibatch in range(steps):
        count = int(draws.integers(0, COUNT + 1))
        slow = minibatch % 50 == 0 and world.rank == minibatch // 50 % world.size
        total = np.zeros(COUNT, dtype=np.int64)
        for piece in range(world.rank, count, world.size):
            exchange.mark_started(piece)
            if slow:
                time.sleep(idle.random() * 2e-3)
            if piece % 7 == 6 or not exchange.publish(piece, content(minibatch, piece)):
                exchange.mark_done(piece)
                total[piece] += 1
        while True:
            for piece, owner, found in exchange.claim(count):
                assert found == content(minibatch, piece) and owner == piece % world.size
                num_from_others += owner != world.rank
                total[piece] += 1
            look = exchange.snapshot(count)
            if look.num_done == count:
                break
        world.comm.Allreduce(MPI.IN_PLACE, total)
        assert (total[:count] == 1).all(), f"step {minibatch}: {total.tolist()}"
        exchange.reset()
        published(world)
    others = sum(world.gather_objects(num_from_others))
    assert (others > 0) == (world.size > 1 and room > 0)


@pytest.mark.parametrize("exchange", [4096], indirect=True)
def test_the_largest_comes_first_and_the_board_shows_ranks_at_work(world, exchange):
    if world.rank == 0:
        exchange.mark_started(0)
        for piece, size in ((1, 10), (2, 30), (3, 20), (4, 30)):
            assert exchange.publish(piece, bytes(size))
        exchange.mark_done(5)
    world.gather_objects(None)
    look = exchange.snapshot(7)
    assert look == ({0: 0}, 1, [2, 4, 3, 1], 1)
    world.gather_objects(None)
    if world.rank == world.size - 1:
        assert [(piece, len(found)) for piece, _, found in exchange.claim(7)] == [(2, 30), (4, 30), (3, 20), (1, 10)]
        assert exchange.snapshot(7).published == []
    world.gather_objects(None)
    exchange.reset()
    published(world)
    assert exchange.snapshot(7) == ({}, 7, [], 0)

"""The work queue: each item to one rank, with its content, however slow ranks or full stores are."""

import time

import numpy as np
import pytest
from mpi4py import MPI

from odc_mpi.comm.work_queue import WorkQueue

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]

COUNT = 12


def content(minibatch, item):
    return np.random.default_rng((minibatch, item)).bytes(40 + 100 * (item % 5))


@pytest.fixture
def work_queue(world, request):
    made = WorkQueue(world, COUNT, request.param)
    yield made
    world.gather_objects(None)
    made.close()
    made.close()


def published(world):
    world.wait_collective(world.comm.Ibarrier(), "synchronizing at parameters_published of a test")


# Space for all; for one or two items at a time, so that segments are reused; for none.
@pytest.mark.parametrize("work_queue", [COUNT * 600, 600, 0], indirect=True)
def test_every_item_once_through_hundreds_of_steps(world, work_queue, request):
    space = request.node.callspec.params["work_queue"]
    draws = np.random.default_rng(5)  # the same on every rank
    idle = np.random.default_rng(world.rank)
    num_from_others = 0
    for minibatch in range(300):
        count = int(draws.integers(0, COUNT + 1))
        slow = minibatch % 50 == 0 and world.rank == minibatch // 50 % world.size
        total = np.zeros(COUNT, dtype=np.int64)
        for item in range(world.rank, count, world.size):
            work_queue.mark_started(item)
            if slow:
                time.sleep(idle.random() * 2e-3)
            if item % 7 == 6 or not work_queue.publish(item, content(minibatch, item)):
                work_queue.mark_done(item)
                total[item] += 1
        while (queue_state := work_queue.snapshot(count)).num_done < count:
            for item, owner, found in work_queue.claim(queue_state.published):
                assert found == content(minibatch, item) and owner == item % world.size
                num_from_others += owner != world.rank
                total[item] += 1
        world.comm.Allreduce(MPI.IN_PLACE, total)
        assert (total[:count] == 1).all(), f"step {minibatch}: {total.tolist()}"
        work_queue.reset()
        published(world)
    others = sum(world.gather_objects(num_from_others))
    assert (others > 0) == (world.size > 1 and space > 0)


@pytest.mark.parametrize("work_queue", [4096], indirect=True)
def test_the_largest_comes_first_and_the_board_shows_ranks_at_work(world, work_queue):
    if world.rank == 0:
        work_queue.mark_started(0)
        for item, size in ((1, 10), (2, 30), (3, 20), (4, 30)):
            assert work_queue.publish(item, bytes(size))
        work_queue.mark_done(5)
    world.gather_objects(None)
    queue_state = work_queue.snapshot(7)
    assert queue_state == ({0: 0}, 1, [2, 4, 3, 1], 1, 6)
    world.gather_objects(None)
    if world.rank == world.size - 1:
        claimed = [(item, len(found)) for item, _, found in work_queue.claim(queue_state.published)]
        assert claimed == [(2, 30), (4, 30), (3, 20), (1, 10)]
        assert work_queue.snapshot(7).published == []
    world.gather_objects(None)
    work_queue.reset()
    published(world)
    assert work_queue.snapshot(7) == ({}, 7, [], 0, 0)


@pytest.mark.parametrize("work_queue", [4096], indirect=True)
def test_every_change_is_seen_without_reading_the_board(world, work_queue, monkeypatch):
    actions = [
        lambda: work_queue.mark_started(0),
        lambda: work_queue.publish(1, b"content"),
        lambda: list(work_queue.claim([1])),
        lambda: work_queue.mark_done(0),
    ]
    board_reads = []
    read_all = work_queue._board.atomic_read_all
    monkeypatch.setattr(work_queue._board, "atomic_read_all", lambda *args: board_reads.append(args) or read_all(*args))
    for i, action in enumerate(actions):
        state = work_queue.snapshot(2)
        del board_reads[:]
        world.gather_objects(None)
        assert not work_queue.has_changed(state)
        world.gather_objects(None)
        if world.rank == i % world.size:
            action()
        world.gather_objects(None)
        assert work_queue.has_changed(state) and not board_reads
    assert work_queue.snapshot(2).num_done == 2


@pytest.mark.sizes(3)
@pytest.mark.parametrize("work_queue", [4096], indirect=True)
def test_ranks_that_lose_a_claim_do_not_follow_each_other(world, work_queue, monkeypatch):
    """All ranks have seen the same items; each claims one, one rank after the other."""
    if world.rank == 0:
        for item in range(COUNT):
            assert work_queue.publish(item, bytes(100 - item))
    world.gather_objects(None)
    published = work_queue.snapshot(COUNT).published
    attempts = []
    try_claim = work_queue._try_claim
    monkeypatch.setattr(work_queue, "_try_claim", lambda item: attempts.append(item) or try_claim(item))
    for rank in range(world.size):
        world.gather_objects(None)
        if rank == world.rank:
            next(work_queue.claim(published))
    everywhere = world.gather_objects(attempts)
    assert [tried[0] for tried in everywhere] == [0, 0, 0], "the largest first"
    assert [len(tried) for tried in everywhere] == [1, 2, 2]
    assert len({tried[-1] for tried in everywhere}) == world.size

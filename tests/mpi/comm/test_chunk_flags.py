"""Chunks of a sequence wait for those they need and for no other rank, in every minibatch."""

import time

import pytest

from odc_mpi.bench.chunk_flags import ChunkFlags
from odc_mpi.data.plan.chunks import SequenceSplit

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(3)]
UNITS = 3


@pytest.fixture
def flags(world):
    made = ChunkFlags(world, UNITS)
    yield made
    world.gather_objects(None)
    made.close()


def run(world, flags, place, split, slow):
    """Run this rank's chunk; return when it reached, computed, and left each unit, forward then backward."""
    index = split.ranks.index(world.rank)
    came, began, left = [], [], []
    for step in range(2 * UNITS):
        came.append(time.monotonic())
        if step < UNITS:
            flags.synchronize(place, split, index, step)
        began.append(time.monotonic())
        time.sleep(0.02 if world.rank == slow else 0.001)
        if step >= UNITS:
            flags.synchronize(place, split, index, step)
        left.append(time.monotonic())
    return came, began, left


def test_keys_come_before_they_are_read_and_gradients_before_they_are_used(world, flags):
    for minibatch in range(2 * world.size):
        slow = minibatch % world.size
        ranks = tuple((minibatch + i) % world.size for i in range(world.size))
        splits = [SequenceSplit(0, tuple(range(world.size + 1)), ranks), SequenceSplit(1, (0, 1, 2), ranks[:2])]
        for place, split in enumerate(splits):
            own = run(world, flags, place, split, slow) if world.rank in split.ranks else None
            everyone = world.gather_objects(own)
            chunks = [everyone[rank] for rank in split.ranks]
            for i, (_, began, left) in enumerate(chunks):
                for step in range(UNITS):
                    assert all(began[step] >= other[0][step] for other in chunks[:i]), (minibatch, step)
                for step in range(UNITS, 2 * UNITS):
                    # Done with a unit of backward: at least a millisecond after it began.
                    assert all(left[step] >= other[1][step] + 0.001 for other in chunks[i + 1 :]), (minibatch, step)
        flags.next_minibatch(len(splits))


def test_the_first_chunk_never_waits_in_forward(world, flags):
    split = SequenceSplit(0, (0, 1, 2), (0, 1))
    if world.rank == 0:
        for step in range(UNITS):
            flags.synchronize(0, split, 0, step)  # no other rank has arrived: it would wait forever
    world.gather_objects(None)
    flags.next_minibatch(1)

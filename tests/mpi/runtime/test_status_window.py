"""The published status of ranks is read one-sidedly and atomically, while they do something else."""

import time

import pytest
from units import while_the_last_rank_computes

from odc_mpi.runtime.status import StatusWindow
from odc_mpi.runtime.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]


@pytest.fixture
def window(world):
    made = StatusWindow(world.comm)
    yield made
    world.comm.Barrier()
    made.free()
    made.free()


def test_every_rank_reads_every_other(world, window):
    window.page.enter_collective("synchronizing at gradients_complete")
    window.page.write(f"forward of unit layers.{world.rank}", world.rank + 1)
    world.comm.Barrier()
    peers = window.read(window.others)
    assert sorted(peers) == [rank for rank in range(world.size) if rank != world.rank]
    for rank, status in peers.items():
        assert (status.what, status.microbatch) == (f"forward of unit layers.{rank}", rank + 1)
        assert status.num_collectives == 1
        assert abs(time.time() - status.published_at) < 30


def test_a_page_that_is_written_all_the_time_is_read_atomically(world, window):
    """Rank 0 reads while the others write, texts and numbers that belong together."""
    texts = [f"backward of unit {'x' * (number * 7 % 150)}" for number in range(200)]
    window.page.write(texts[0], 0)
    world.comm.Barrier()
    request = world.comm.Ibarrier() if world.rank else None
    if world.rank == 0:
        numbers = set()
        for _ in range(300):
            for status in window.read(window.others).values():
                assert status.what == texts[status.microbatch]
                numbers.add((status.microbatch, status.heartbeat_number))
        assert len(numbers) > 5 or world.size == 1, "no rank wrote meanwhile"
        world.comm.Ibarrier().Wait()
    else:
        number = 0
        while not request.Test():
            for _ in range(100):
                number = (number + 1) % len(texts)
                window.page.write(texts[number], number)


def test_a_rank_that_computes_is_read_at_once(world, window, base):
    if world.num_nodes > 1:
        pytest.skip("over a network its rank has to call MPI")
    window.page.write("computing", 5)
    world.comm.Barrier()

    def read():
        assert all(status.microbatch == 5 for status in window.read(window.others).values())

    while_the_last_rank_computes(world, base, read)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_reports_progress_is_waited_for_beyond_the_deadline():
    with World(timeout_s=60) as world:
        world.timeout_s = 2 if world.rank == 0 else 60
        end = time.monotonic() + 4.5  # beyond two deadlines
        while world.rank == 1 and time.monotonic() < end:
            world.set_status(f"generating, token {time.monotonic()}")
            time.sleep(0.05)
        assert world.gather_objects(world.rank) == list(range(world.size))
        world.timeout_s = 60
        assert not any(status.aborting for status in world.job.status.read(world.job.status.others).values())


def test_a_freed_window_has_no_status(world):
    window = StatusWindow(world.comm)
    window.free()
    window.page.write("after")
    assert all(status is None for status in window.read(window.others).values())

"""What ranks do while they wait for each other outside of training."""

import time

import pytest

LATE_S = 2.0


@pytest.mark.mpi(min_size=2)
def test_who_waits_for_a_late_rank_leaves_it_the_core(world):
    """In MPI's own blocking operations it would spin: a core taken, at times, from the rank that is late."""
    world.gather_objects(None)
    if world.rank == 0:
        time.sleep(LATE_S)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    assert world.gather_objects(world.rank) == list(range(world.size))
    waited_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    if world.rank:
        assert waited_s > LATE_S / 4
        assert cpu_s < waited_s / 2

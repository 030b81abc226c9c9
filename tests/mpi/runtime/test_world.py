"""Activity of ranks that wait for each other outside of training."""

import threading
import time
from pathlib import Path

import pytest
from mpi4py import MPI

from odc_mpi.errors import UserError
from odc_mpi.runtime import memory
from odc_mpi.runtime import world as worlds
from odc_mpi.runtime.world import World

LATE_S = 0.6


@pytest.mark.parametrize("timeout_s", [0.9, 0.0, -1.0, float("nan")])
def test_a_time_out_that_no_rank_could_keep_is_refused(timeout_s):
    with pytest.raises(UserError, match="timeout_s must be a number of seconds, 1 or more, got"):
        World(timeout_s=timeout_s)


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


def test_ranks_of_a_host_share_its_cores_whatever_mpi_takes_for_a_node(world, monkeypatch):
    assert (world.host_rank, world.host_size) == (world.rank, world.size), "all tests run on one host"
    cores = world.cores_per_rank()
    monkeypatch.setattr(world, "node", world.rank)  # as under MPIR_CVAR_NOLOCAL
    monkeypatch.setattr(world, "local_size", 1)
    assert world.cores_per_rank() == cores


@pytest.mark.skipif(MPI.Query_thread() != MPI.THREAD_MULTIPLE, reason="the thread runs under MPI_THREAD_MULTIPLE")
def test_the_world_s_own_thread_is_prepared_before_it_calls_mpi(world):
    prepared = threading.Event()
    world.prepare_threads(prepared.set)
    assert prepared.wait(5.0)
    world.prepare_threads(lambda: None)


@pytest.mark.sizes(1, 2, 3)
def test_a_world_splits_into_those_of_its_nodes(world):
    before = threading.active_count()
    with world.split("node") as node:
        assert (node.rank, node.size, node.num_nodes) == (world.local_rank, world.local_size, 1)
        assert node.gather_objects(world.rank) == world.node_ranks
        assert threading.active_count() == before, "one watchdog and one status thread for the job"
        with node.split("node") as again:
            assert again.gather_objects(world.rank) == world.node_ranks


@pytest.mark.sizes(1, 2)
def test_a_single_rank_calls_no_collectives(world):
    """Each rank as often as it likes, and the ranks of the job still agree on their number of collectives."""
    with world.split("self") as alone:
        assert (alone.rank, alone.size, alone.timeout_s) == (0, 1, world.timeout_s)
        for _ in range(world.rank + 1):
            assert alone.gather_objects(world.rank) == [world.rank]
    assert len(set(world.gather_objects(world.job.status.page.num_collectives))) == 1


@pytest.mark.mpi(min_size=2)
def test_the_name_of_memory_goes_when_every_rank_has_mapped_it(world, monkeypatch, tmp_path):
    """A library that opened it by name later would find it until then."""
    name = world.gather_objects(str(tmp_path / "memory"))[0]
    for mapped_by, stays in (([0], True), (range(world.size), False)):
        if world.rank == 0:
            Path(name).touch()
        monkeypatch.setattr(memory, "startup_shm_names", lambda: {name} if world.rank in mapped_by else set())  # noqa: B023
        worlds.World(world.comm).close()
        assert Path(name).exists() == stays
        world.gather_objects(None)

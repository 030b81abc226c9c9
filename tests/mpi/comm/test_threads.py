"""Fetches and pushes from two threads beside the main thread's own: nothing is lost, nothing comes half."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI
from units import assert_fetched, assert_sums, write_parameters

from odc_mpi.api import shard_model
from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.settings import CommConfig
from odc_mpi.errors import UserError
from odc_mpi.runtime.lateness import PendingWait
from odc_mpi.runtime.world import World
from odc_mpi.shard.prefetch import CommunicationThread

pytestmark = pytest.mark.mpi

SIZES = [33, 1000, 65_537, 300_000]
ROUNDS = 20


@pytest.fixture
def transport(world, allocate):
    return allocate(window_transport(world, comm=CommConfig(zero_copy="off")), SIZES)


@pytest.fixture
def threads():
    made = CommunicationThread("fetch"), CommunicationThread("push")
    yield made
    for thread in made:
        thread.close()


def test_both_libraries_let_several_threads_in(transport):
    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
    assert transport.thread_safe


def test_without_leave_of_the_library_there_are_no_threads(world, monkeypatch):
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    assert not window_transport(world).thread_safe


def in_a_thread(work):
    """Return the result of a function in a thread that is not the main one, or raise what it raised."""
    with ThreadPoolExecutor(1, thread_name_prefix="autograd") as executor:
        return executor.submit(work).result()


def test_serialized_calls_may_come_from_any_thread(monkeypatch):
    """As in a backward on a GPU, which torch runs in a thread of its own."""
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    with World(timeout_s=60) as world:
        assert in_a_thread(lambda: world.gather_objects(world.rank)) == list(range(world.size))


def test_without_threads_a_deadline_says_that_no_rank_can_be_asked(monkeypatch):
    messages = []
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    monkeypatch.setattr("odc_mpi.runtime.job.abort", messages.append)
    with World(timeout_s=60) as world:
        world.job._expired(PendingWait("synchronizing", collective=9), 61.0)
        world.job._expired(PendingWait("fetching unit x", owners=(0,)), 61.0)
    unknown = "(other ranks cannot be asked under MPI_THREAD_SERIALIZED); the limit is comm.timeout_s"
    assert messages[0].endswith(f"while synchronizing: another rank is late, stuck or dead {unknown}")
    assert messages[1].endswith(f"while fetching unit x: it waits for rank 0 on {world.hosts[0]} {unknown}")


@pytest.mark.parametrize("level", ["MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED"])
def test_another_thread_is_refused_where_mpi_lets_the_main_thread_alone_call_it(monkeypatch, level):
    monkeypatch.setattr(MPI, "Query_thread", lambda: getattr(MPI, level.removeprefix("MPI_")))
    with World(timeout_s=60) as world:
        comm = CommConfig(zero_copy="off", reduction="accumulate", progress="off", gradient_cache_bytes=0)
        # A gradient that stays here until the gradients are complete would call nothing.
        model = shard_model(torch.nn.Linear(2, 2), world, comm=comm)
        refused = pytest.raises(UserError, match=rf"from the main thread only \({level}\), .* autograd_0")
        with model.minibatch():
            loss = model(torch.ones(1, 2)).sum()
            with refused:
                in_a_thread(loss.backward)
        model.publish()
        with pytest.raises(UserError, match=f"run.device: cuda requires MPI_THREAD_SERIALIZED, .* got {level}"):
            shard_model(torch.nn.Linear(2, 2), world, comm=comm, device="cuda")


def count_threads():
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def test_a_fetch_in_a_thread_starts_no_other_threads(world, allocate, threads):
    """As torch does for a large copy: each thread that calls it gets a team of its own."""
    transport = allocate(window_transport(world, comm=CommConfig(zero_copy="off")), [1 << 20])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(1 << 20).add_(1)  # the main thread has its team
        num_threads = count_threads()
        buffer = transport.parameters.acquire_buffer(0)
        threads[0].start(transport.parameters.start_fetch, 0, buffer).wait()
        assert count_threads() == num_threads + 1
    finally:
        torch.set_num_threads(before)


def test_three_threads_fetch_and_push_at_a_time(transport, threads, world):
    """Integers, so that sums are exact; the main thread fetches what the other thread does not fetch just then."""
    fetch_thread, push_thread = threads
    rng = np.random.default_rng(world.rank)
    parameters = [torch.arange(numel, dtype=torch.float32) + 1000 * index for index, numel in enumerate(SIZES)]
    write_parameters(transport, parameters)
    pushes = []
    for number in range(ROUNDS):
        mine, other = rng.permutation(len(SIZES))[:2].tolist()
        ahead = torch.full((SIZES[other],), float("nan"))
        fetch = fetch_thread.start(transport.parameters.start_fetch, other, ahead)
        gradient = torch.full((SIZES[number % len(SIZES)],), float(world.rank + number))
        pushes.append((push_thread.start(transport.gradients.push, number % len(SIZES), gradient, 0), gradient))
        assert_fetched(transport, parameters, [mine])
        fetch.wait()
        assert torch.equal(ahead, parameters[other])
    for push, _ in pushes:
        push.wait()
    transport.complete_gradients(np.zeros(1))
    numbers = [range(index, ROUNDS, len(SIZES)) for index in range(len(SIZES))]
    totals = [sum(rank + number for rank in range(world.size) for number in each) for each in numbers]
    assert_sums(transport, [torch.full((numel,), total) for numel, total in zip(SIZES, totals, strict=True)])
    transport.publish_parameters()

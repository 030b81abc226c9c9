"""Gradients through mailboxes: exact sums with little room, slow owners, threads, and all pushing to all."""

import threading
import time
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from pretended_nodes import on_pretended_nodes
from units import while_the_last_rank_computes

from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.reduce.rings import Rings

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]

SMALLEST = 256  # bytes of a ring


#: Also on two pretended nodes, where the ranks of a node share rings.
on_nodes = pytest.mark.parametrize("ranks", ["node", "nodes"], indirect=True)


@pytest.fixture
def ranks(world, request):
    if getattr(request, "param", "node") == "node":
        return world
    if world.size < 3:
        pytest.skip("every rank has its own rings")
    return on_pretended_nodes(world)


@pytest.fixture
def make(ranks, allocate):
    def build(sizes, ring_bytes):
        mailbox_bytes = ring_bytes * max(1, Rings(ranks, 4).count)
        return allocate(window_transport(ranks, reduction="mailbox", mailbox_bytes=mailbox_bytes), sizes)

    return build


@contextmanager
def serving(reduction, pause_s=1e-4):
    """Have a thread serve, as `comm.progress: thread` does."""
    stop = threading.Event()

    def serve():
        while not stop.wait(pause_s):
            reduction.make_progress()

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    stop.set()
    thread.join()


def complete_and_check(transport, wanted):
    """Complete the gradients, compare this rank's shards with full arrays, clear them, publish the parameters."""
    transport.complete_gradients(np.zeros(1))
    for index, layout in enumerate(transport.parameters.layouts):
        start, stop = layout.owned(transport.group.rank)
        own = transport.gradients.shard(index)
        assert torch.equal(own[: stop - start].double(), wanted[index][start:stop].double())
        assert not own[stop - start :].any(), "padding was written to"
        own.zero_()
    transport.publish_parameters()


@on_nodes
def test_all_push_to_all_at_once_with_the_smallest_mailbox(make, world):
    """All ranks have several pushes in flight and no free slots: all wait, all make progress, all continue."""
    numel = 3000
    transport = make([numel, numel], SMALLEST)
    values = torch.arange(numel, dtype=torch.float32)
    for minibatch in range(3):
        pushes = [transport.gradients.push(i % 2, values + minibatch, 0) for i in range(6)]
        for push in reversed(pushes):
            push.wait()
        complete_and_check(transport, [3 * world.size * (values + minibatch)] * 2)


@pytest.mark.mpi(min_size=2)
def test_a_slow_owner_slows_its_origins_and_loses_nothing(make, world):
    numel, slow = 40_000, world.size - 1
    transport = make([numel], 8 * SMALLEST)
    values = torch.arange(numel, dtype=torch.float32) % 1000
    began = time.perf_counter()
    if world.rank == slow:
        while time.perf_counter() - began < 1.0:
            torch.randn(1000).sum()
    transport.gradients.push(0, values, 0).wait()
    assert time.perf_counter() - began > 0.9, "more was pushed than there is room for"
    complete_and_check(transport, [world.size * values])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("serves", [False, True], ids=["room for all", "thread"])
def test_a_computing_owner_delays_no_push(make, world, base, serves):
    """Or while a thread that serves makes room for far more than its mailbox holds."""
    numel, count = 100_000, 5 if serves else 1
    transport = make([numel], 1 << 16 if serves else 1 << 20)
    values = torch.ones(numel)
    transport.publish_parameters()

    def push():
        for _ in range(count):
            transport.gradients.push(0, values).wait()

    with serving(transport.gradients, 1e-3) if serves else nullcontext():
        while_the_last_rank_computes(world, base, push)
        complete_and_check(transport, [count * (world.size - 1) * values])


@on_nodes
def test_a_thread_serves_while_the_main_thread_pushes(make, world):
    """Both add to the same shard: the thread what others push, the main thread its own part."""
    numel = 1_000_000 * world.size  # so that adding takes long enough to meet
    transport = make([numel], 1 << 22)
    values = torch.ones(numel)
    with serving(transport.gradients, 1e-5):
        for _ in range(3):
            for _ in range(10):
                transport.gradients.push(0, values, 0).wait()
            complete_and_check(transport, [10.0 * world.size * values])

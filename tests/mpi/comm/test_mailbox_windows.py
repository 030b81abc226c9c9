"""Gradients through mailboxes: exact sums with little room, slow owners, threads, and all pushing to all."""

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from pretended_nodes import on_pretended_nodes

from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.reduce.mailbox import MailboxGradientStore
from odc_mpi.comm.reduce.rings import Rings

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]

SMALLEST = 256  # bytes of a ring


#: Also on two pretended nodes, where the ranks of a node share rings.
on_nodes = pytest.mark.parametrize("world", ["node", "nodes"], indirect=True)


@pytest.fixture
def world(world, request):
    if getattr(request, "param", "node") == "node":
        return world
    if world.size < 3:
        pytest.skip("every rank has its own rings")
    return on_pretended_nodes(world)


@pytest.fixture
def make(world, allocate):
    def build(sizes, ring_bytes, reduce_dtype=torch.float32):
        reductions = []

        def reduction(*arguments):
            mailbox_bytes = ring_bytes * max(1, Rings(world, 4).count)
            reductions.append(MailboxGradientStore(*arguments, mailbox_bytes=mailbox_bytes))
            return reductions[-1]

        transport = window_transport(world, reduce_dtype=reduce_dtype, reduction=reduction)
        return allocate(transport, sizes), reductions[0]

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
    transport, _ = make([numel, numel], SMALLEST)
    values = torch.arange(numel, dtype=torch.float32)
    for minibatch in range(3):
        pushes = [transport.gradients.push(i % 2, values + minibatch, 0) for i in range(6)]
        for push in reversed(pushes):
            push.wait()
        complete_and_check(transport, [3 * world.size * (values + minibatch)] * 2)


@pytest.mark.mpi(min_size=2)
def test_a_slow_owner_slows_its_origins_and_loses_nothing(make, world):
    numel, slow = 40_000, world.size - 1
    transport, _ = make([numel], 8 * SMALLEST)
    values = torch.arange(numel, dtype=torch.float32) % 1000
    began = time.perf_counter()
    if world.rank == slow:
        while time.perf_counter() - began < 1.0:
            torch.randn(1000).sum()
    transport.gradients.push(0, values, 0).wait()
    assert time.perf_counter() - began > 0.9, "more was pushed than there is room for"
    complete_and_check(transport, [world.size * values])


@pytest.mark.mpi(min_size=2)
def test_a_computing_owner_delays_no_push_while_its_mailbox_has_space(make, world):
    numel = 10_000 * world.size
    transport, _ = make([numel], 1 << 20)
    values = torch.ones(numel)
    transport.publish_parameters()
    began = time.perf_counter()
    if world.rank == world.size - 1:
        while time.perf_counter() - began < 1.5:
            torch.randn(1000).sum()
    else:
        transport.gradients.push(0, values, 0).wait()
        assert time.perf_counter() - began < 0.75, "the push waited for its owner"
    complete_and_check(transport, [(world.size - 1) * values])


@on_nodes
def test_a_thread_serves_while_the_main_thread_pushes(make, world):
    """Both add to the same shard: the thread what others push, the main thread its own part."""
    numel = 1_000_000 * world.size  # so that adding takes long enough to meet
    transport, reduction = make([numel], 1 << 22)
    values = torch.ones(numel)
    with serving(reduction, 1e-5):
        for _ in range(3):
            for _ in range(10):
                transport.gradients.push(0, values, 0).wait()
            complete_and_check(transport, [10.0 * world.size * values])


@pytest.mark.mpi(min_size=2)
def test_with_a_thread_that_serves_a_computing_owner_is_not_waited_for(make, world):
    """A computing rank gets far more than its mailbox holds."""
    numel = 100_000
    transport, reduction = make([numel], 1 << 16)
    values = torch.ones(numel)
    transport.publish_parameters()
    began = time.perf_counter()
    with serving(reduction, 1e-3):
        if world.rank == world.size - 1:
            while time.perf_counter() - began < 2.5:
                torch.randn(1000).sum()
        else:
            for _ in range(5):
                transport.gradients.push(0, values, 0).wait()
            assert time.perf_counter() - began < 2.0, "the pushes waited for their owner"
        complete_and_check(transport, [5.0 * (world.size - 1) * values])

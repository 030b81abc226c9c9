"""Gradients through mailboxes, with owners that compute and threads that serve."""

import threading
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from pretended_nodes import on_pretended_nodes
from units import assert_sums, while_the_last_rank_computes

from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.settings import CommConfig

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


@contextmanager
def serving(transport, pause_s):
    """Have a thread serve, as `comm.progress: thread` does."""
    stop = threading.Event()

    def make_progress():
        while not stop.wait(pause_s):
            transport.gradients.make_progress()

    thread = threading.Thread(target=make_progress)
    thread.start()
    yield
    stop.set()
    thread.join()


def complete_and_check(transport, wanted):
    """Complete the gradients, compare this rank's shard with the full array, clear it, publish the parameters."""
    transport.complete_gradients(np.zeros(1))
    assert_sums(transport, [wanted])
    transport.gradients.shard(0).zero_()
    transport.publish_parameters()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("serves", [False, True], ids=["room for all", "thread"])
def test_a_computing_owner_delays_no_push(world, allocate, base, serves):
    """Or while a thread that serves makes room for far more than its mailbox holds."""
    numel, count = 100_000, 5 if serves else 1
    mailbox_bytes = (1 << 16 if serves else 1 << 20) * (world.size - 1)
    comm = CommConfig(reduction="mailbox", mailbox_bytes=mailbox_bytes)
    transport = allocate(window_transport(world, comm=comm), [numel])
    values = torch.ones(numel)
    transport.publish_parameters()

    def push():
        for _ in range(count):
            transport.gradients.push(0, values).wait()

    with serving(transport, 1e-3) if serves else nullcontext():
        while_the_last_rank_computes(world, base, push)
        complete_and_check(transport, count * (world.size - 1) * values)


@pytest.mark.parametrize("on_nodes", [False, True], ids=["node", "nodes"])
def test_a_thread_serves_while_the_main_thread_pushes(world, allocate, on_nodes):
    """Both add to the same shard: the thread what others push, the main thread its own part.

    Also on two pretended nodes, where the ranks of a node share rings.
    """
    if on_nodes and world.size < 3:
        pytest.skip("every rank has its own rings")
    numel = 1_000_000 * world.size  # so that adding takes long enough to meet
    ranks = on_pretended_nodes(world) if on_nodes else world
    transport = allocate(window_transport(ranks, comm=CommConfig(reduction="mailbox", mailbox_bytes=3 << 22)), [numel])
    values = torch.ones(numel)
    with serving(transport, 1e-5):
        for _ in range(3):
            for _ in range(10):
                transport.gradients.push(0, values, 0).wait()
            complete_and_check(transport, 10.0 * world.size * values)

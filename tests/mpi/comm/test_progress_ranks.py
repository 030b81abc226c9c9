"""A thread that serves others while its rank computes."""

import sys
import threading
import time

import numpy as np
import pytest
import torch
from mpi4py import MPI

from odc_mpi.api import decide_for, shard_model
from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.comm.progress import ProgressThread

pytestmark = pytest.mark.mpi

BUSY_S = 1.5


def read_from_a_computing_rank(world):
    """Seconds that rank 0 needs to read from the last rank, which computes for BUSY_S without calling MPI.

    The window is one over memory of our own: on host memory both libraries then carry a Get by messages, on one node
    too, so that the target has to drive them.
    """
    memory = np.full(1000, world.rank + 1.0)
    window = MPI.Win.Create(memory, 8, MPI.INFO_NULL, world.comm)
    window.Lock_all(MPI.MODE_NOCHECK)
    world.gather_objects(None)
    began = time.perf_counter()
    took = None
    if world.rank == world.size - 1:
        with world.background_progress_off():
            while time.perf_counter() - began < BUSY_S:
                np.dot(memory, memory)
    elif world.rank == 0:
        time.sleep(0.2)  # until the other has left the meeting above, in which it would still serve
        values = np.zeros(1000)
        window.Get(values, world.size - 1)
        window.Flush(world.size - 1)
        took = time.perf_counter() - began
        assert (values == world.size).all()
    world.gather_objects(None)
    window.Unlock_all()
    window.Free()
    return took


@pytest.mark.mpi(min_size=2)
def test_without_it_a_computing_rank_is_waited_for(world):
    took = read_from_a_computing_rank(world)
    assert took is None or took > BUSY_S / 2, "this window shows nothing about progress"


@pytest.mark.mpi(min_size=2)
def test_with_it_no_rank_waits(world):
    progress = ProgressThread(world, make_progress=lambda: False)
    took = read_from_a_computing_rank(world)
    progress.close()
    assert took is None or took < BUSY_S / 3


def test_it_serves_again_and_again_until_it_is_closed(world):
    polls = []
    progress = ProgressThread(world, make_progress=lambda: polls.append(threading.current_thread().name))
    time.sleep(0.3)
    progress.close()
    seen = len(polls)
    assert seen >= 10
    assert set(polls) == {"odc_mpi-progress"}
    time.sleep(0.05)
    assert len(polls) == seen
    progress.close()


def test_the_switch_interval_is_short_until_the_last_one_is_closed(world, monkeypatch):
    monkeypatch.setattr(ProgressThread, "_num_running", 0)  # not those of other tests
    usual, found = 5e-3, sys.getswitchinterval()
    sys.setswitchinterval(usual)
    first, second = (ProgressThread(world, make_progress=lambda: False) for _ in range(2))
    short = sys.getswitchinterval()
    first.close()
    between = sys.getswitchinterval()
    second.close()
    after = sys.getswitchinterval()
    sys.setswitchinterval(found)
    assert short == between < after == pytest.approx(usual)


def test_a_transport_has_one(world):
    layout = FlatLayout.build("unit", [ParameterSpec("p", (100,), True)], world.size)
    transport = window_transport(world, progress=True)
    transport.allocate([layout])
    transport.gradients.push(0, torch.ones(100)).wait()
    transport.complete_gradients(np.zeros(1))
    start, stop = layout.owned(world.rank)
    assert torch.equal(transport.gradients.shard(0)[: stop - start], torch.full((stop - start,), float(world.size)))
    assert transport.group._progress is not None
    transport.close()


@pytest.mark.sizes(3)
def test_a_full_mailbox_of_a_rank_that_sleeps_or_generates_delays_no_push(world, base):
    """Rank 0 pushes more than its rings hold. Rank 1 sleeps and rank 2 generates without fetches until it is done."""
    module = torch.nn.Linear(64, 64)
    decision = decide_for(world, reduction="mailbox", mailbox_bytes=4096)
    model = shard_model(
        module,
        world,
        decision=decision,
        prefetch=0,
        parameter_cache_bytes=0,
        gradient_cache_bytes=0,
    )
    x, deadline = torch.ones(2, 64), time.monotonic() + 30
    with model.minibatch():
        if world.rank == 0:
            for _ in range(5):
                model(x).sum().backward()
            base.touch()
        with model.unsharded(gradients=False), torch.no_grad():
            while not base.exists() and time.monotonic() < deadline:
                model(x) if world.rank == 2 else time.sleep(1e-3)
        assert base.exists(), "the pushes waited for a rank that neither fetches nor pushes"
    model.publish()
    model.close()

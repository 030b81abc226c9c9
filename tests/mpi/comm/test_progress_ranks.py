"""A thread that serves others while its rank computes."""

import sys
import time

import numpy as np
import pytest
import torch
from mpi4py import MPI
from units import wait_for_file

from odc_mpi.api import shard_model
from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.progress import ProgressThread
from odc_mpi.comm.settings import CommConfig

pytestmark = pytest.mark.mpi


def get_completes(world, base, busy_s):
    """Return False on the last rank, which computes without calling MPI, if rank 0 cannot read from it meanwhile.

    The window is one over memory of our own: on host memory both libraries then carry a Get by messages, on one node
    too, so that the target has to drive them.
    """
    memory, completed = np.full(1000, world.rank + 1.0), True
    computes = base.with_name(f"{base.name}.computes")
    window = MPI.Win.Create(memory, 8, MPI.INFO_NULL, world.comm)
    window.Lock_all(MPI.MODE_NOCHECK)
    world.gather_objects(None)
    if world.rank == world.size - 1:
        until = time.monotonic() + busy_s
        with world.background_progress_off():
            computes.touch()
            while not (completed := base.exists()) and time.monotonic() < until:
                np.dot(memory, memory)
    elif world.rank == 0:
        wait_for_file(computes)  # in the gathering above the other would still serve
        values = np.zeros(1000)
        window.Get(values, world.size - 1)
        window.Flush(world.size - 1)
        assert (values == world.size).all()
        base.touch()
    world.gather_objects(None)
    window.Unlock_all()
    window.Free()
    return completed


@pytest.mark.mpi(min_size=2)
def test_with_it_no_rank_waits(world, base):
    without = get_completes(world, base, busy_s=0.5)
    assert without == (world.rank < world.size - 1), "this window shows nothing about progress"
    progress = ProgressThread(world, make_progress=lambda: False)
    assert get_completes(world, base.with_name(f"{base.name}.thread"), busy_s=30.0)
    progress.close()
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


def test_a_transport_has_one(world, allocate):
    assert allocate(window_transport(world, comm=CommConfig(progress="thread")), [100]).group._progress is not None


@pytest.mark.sizes(3)
def test_a_full_mailbox_of_a_rank_that_sleeps_or_generates_delays_no_push(world, base):
    """Rank 0 pushes more than its rings hold. Rank 1 sleeps and rank 2 generates without fetches until it is done."""
    module = torch.nn.Linear(64, 64)
    without = {"prefetch": 0, "parameter_cache_bytes": 0, "gradient_cache_bytes": 0}
    model = shard_model(module, world, comm=CommConfig(reduction="mailbox", mailbox_bytes=4096, **without))
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

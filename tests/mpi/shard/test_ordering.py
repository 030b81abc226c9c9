"""Three synchronization points between two minibatches; no rank waits for another within one."""

import time

import pytest
import torch
from torch import nn
from units import Block

from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.group import Group
from odc_mpi.comm.settings import CommConfig
from odc_mpi.shard.model import ShardedModel
from odc_mpi.shard.spans import SYNC_POINTS

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]


@pytest.fixture(
    params=[("accumulate", 0), ("accumulate", 1), ("mailbox", 1)],
    ids=["accumulate", "accumulate ahead", "mailbox ahead"],
)
def model(world, request):
    reduction, prefetch = request.param
    torch.manual_seed(1)
    module = nn.Sequential(Block(), Block(), Block(), nn.Linear(16, 1))
    transport = window_transport(world, comm=CommConfig(reduction=reduction))
    model = ShardedModel(module, transport, units=[Block], prefetch=prefetch)
    model.spans.start_recording()
    yield model
    model.close()


def run_minibatch(model, num_microbatches, pause_s=0.0):
    with model.minibatch("microbatches") as totals:
        for _ in range(num_microbatches):
            time.sleep(pause_s)
            model(torch.randn(2, 16)).square().mean().backward()
            totals.local["microbatches"] += 1
    return totals


@pytest.mark.parametrize("clips", [True, False])
def test_synchronization_points_of_a_step(model, world, clips):
    optimizer, before = torch.optim.SGD(model.shard_parameters(), lr=0.1), model.usage.num_collectives
    points = [point for point in SYNC_POINTS if clips or point != "grad_norm"]
    for step in range(3):
        assert model.gather_values([world.rank, step]).tolist() == [[rank, step] for rank in range(world.size)]
        # Ranks run different numbers of microbatches, the first at some time none.
        totals = run_minibatch(model, (world.rank + step) % 3)
        assert totals.sum("microbatches") == sum((rank + step) % 3 for rank in range(world.size))
        if clips:
            model.clip_grad_norm_(1.0)
        optimizer.step()
        model.publish()
    found = [span.kind for span in model.spans.drain() if span.kind in SYNC_POINTS]
    assert found == points * 3
    assert model.usage.num_collectives == before + len(found)


@pytest.mark.mpi(min_size=2)
def test_no_rank_waits_for_a_slow_rank_before_gradients_are_complete(model, world, monkeypatch):
    run_minibatch(model, 1)  # first touches are slow
    model.publish()
    arrivals, gather = [], Group.gradients_complete
    monkeypatch.setattr(
        Group, "gradients_complete", lambda *given: (arrivals.append(time.perf_counter()), gather(*given))[1]
    )
    began = time.perf_counter()
    slow = world.rank == world.size - 1
    run_minibatch(model, 3, pause_s=0.6 if slow else 0.0)
    waited, left = arrivals[0] - began, time.perf_counter() - began
    model.publish()
    assert waited > 1.7 if slow else waited < 0.9, f"rank {world.rank} came to A after {waited:.2f} s"
    assert left > 1.7, "no rank may pass A before the slow rank reaches it"

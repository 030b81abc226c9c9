"""Three synchronization points between two minibatches; no rank waits for another within one."""

import time

import pytest
import torch
from torch import nn
from units import Block, wait_for_file

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


def run_minibatch(model, num_microbatches, begin=lambda number: None):
    with model.minibatch("microbatches") as totals:
        for number in range(num_microbatches):
            begin(number)
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
def test_no_rank_waits_for_a_slow_rank_before_gradients_are_complete(model, world, base, monkeypatch):
    """The slow rank goes on when the others have come to A, which none of them passes before it comes there, too."""
    arrived = [base.with_name(f"{base.name}.{rank}") for rank in range(world.size)]
    arrivals, gather = [], Group.gradients_complete

    def arrive(*given):
        arrivals.append(time.monotonic())
        arrived[world.rank].touch()
        return gather(*given)

    def be_slow(number):
        if number == 1 and world.rank == world.size - 1:
            for path in arrived[:-1]:
                wait_for_file(path, world.progress.run_tasks)  # a full mailbox is emptied, as while it fetches
            time.sleep(0.05)

    monkeypatch.setattr(Group, "gradients_complete", arrive)
    run_minibatch(model, 3, be_slow)
    left = time.monotonic()
    model.publish()
    last = max(world.gather_objects(arrivals[0]))
    assert left > last, "no rank may pass A before the slow rank reaches it"

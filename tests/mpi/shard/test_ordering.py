"""Three synchronization points between two minibatches; no rank waits for another within one."""

import time

import pytest
import torch
from torch import nn
from units import Block, assert_nan_is_known_to_all

from odc_mpi.comm import factory
from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.group import Group
from odc_mpi.shard.model import ShardedModel

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]


class Counting(Group):
    """Writes down what is called, and when."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.calls = []
        self.arrivals = []

    def gradients_complete(self, report):
        self.calls.append("A")
        self.arrivals.append(time.perf_counter())
        return super().gradients_complete(report)

    def norm(self, values):
        self.calls.append("N")
        return super().norm(values)

    def parameters_published(self):
        self.calls.append("B")
        super().parameters_published()

    def broadcast(self, tensor):
        self.calls.append("broadcast")
        super().broadcast(tensor)


@pytest.fixture(
    params=[("accumulate", 0), ("accumulate", 1), ("mailbox", 1)],
    ids=["accumulate", "accumulate ahead", "mailbox ahead"],
)
def counted(world, request, monkeypatch):
    monkeypatch.setattr(factory, "Group", Counting)
    reduction, prefetch = request.param
    torch.manual_seed(1)
    module = nn.Sequential(Block(), Block(), Block(), nn.Linear(16, 1))
    transport = window_transport(world, reduction=reduction)
    model = ShardedModel(module, transport, units=[Block], prefetch=prefetch)
    transport.group.calls.clear()
    transport.group.num_collectives = 0
    yield model, transport.group
    model.close()


def run_minibatch(model, num_microbatches, pause_s=0.0):
    with model.minibatch("microbatches") as totals:
        for _ in range(num_microbatches):
            time.sleep(pause_s)
            model(torch.randn(2, 16)).square().mean().backward()
            totals.local["microbatches"] += 1
    return totals


@pytest.mark.parametrize("clips", [True, False])
def test_synchronization_points_of_a_step(counted, world, clips):
    model, group = counted
    optimizer = torch.optim.SGD(model.shard_parameters(), lr=0.1)
    for step in range(3):
        # Ranks run different numbers of microbatches, the first at some time none.
        totals = run_minibatch(model, (world.rank + step) % 3)
        assert totals.sum("microbatches") == sum((rank + step) % 3 for rank in range(world.size))
        if clips:
            model.clip_grad_norm_(1.0)
        optimizer.step()
        model.publish()
    assert group.calls == (["A", "N", "B"] if clips else ["A", "B"]) * 3
    assert group.num_collectives == len(group.calls)


@pytest.mark.mpi(min_size=2)
def test_no_rank_waits_for_a_slow_rank_before_gradients_are_complete(counted, world):
    model, group = counted
    run_minibatch(model, 1)  # first touches are slow
    model.publish()
    group.arrivals.clear()
    began = time.perf_counter()
    slow = world.rank == world.size - 1
    run_minibatch(model, 3, pause_s=0.6 if slow else 0.0)
    waited = group.arrivals[0] - began
    left = time.perf_counter() - began
    model.publish()
    assert waited > 1.7 if slow else waited < 0.9, f"rank {world.rank} came to A after {waited:.2f} s"
    assert left > 1.7, "nobody may pass A before the slow rank has come"


def test_a_gradient_that_is_not_finite_is_known_to_all(counted, world):
    model, _ = counted
    assert_nan_is_known_to_all(model, world, lambda: run_minibatch(model, 1))

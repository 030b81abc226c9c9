"""Between two minibatches exactly A, N, B; within one, nobody waits for anybody."""

import time

import pytest
import torch
from torch import nn

from odc_mpi.comm.reduce.accumulate import AccumulateReduction
from odc_mpi.comm.reduce.mailbox import MailboxReduction
from odc_mpi.comm.windows.window import WindowTransport
from odc_mpi.shard.model import ShardedModel

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]


class CountingTransport(WindowTransport):
    """Writes down what is called, and when."""

    def __init__(self, world, reduction):
        super().__init__(world, reduction=reduction)
        self.calls = []
        self.arrivals = []

    def complete_gradients(self, report):
        self.calls.append("A")
        self.arrivals.append(time.perf_counter())
        return super().complete_gradients(report)

    def sum_over_ranks(self, values):
        self.calls.append("N")
        return super().sum_over_ranks(values)

    def publish_parameters(self):
        self.calls.append("B")
        super().publish_parameters()

    def broadcast(self, tensor):
        self.calls.append("broadcast")
        super().broadcast(tensor)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


@pytest.fixture(
    params=[(AccumulateReduction, 0), (AccumulateReduction, 1), (MailboxReduction, 1)],
    ids=["accumulate", "accumulate ahead", "mailbox ahead"],
)
def counted(world, request):
    reduction, prefetch = request.param
    torch.manual_seed(1)
    module = nn.Sequential(Block(), Block(), Block(), nn.Linear(16, 1))
    transport = CountingTransport(world, reduction)
    model = ShardedModel(module, transport, units=[Block], prefetch=prefetch)
    transport.calls.clear()
    transport._num_collectives = 0
    yield model, transport
    model.close()


def run_minibatch(model, num_microbatches, pause_s=0.0):
    with model.minibatch("microbatches") as totals:
        for _ in range(num_microbatches):
            time.sleep(pause_s)
            model(torch.randn(2, 16)).square().mean().backward()
            totals.values["microbatches"] += 1
    return totals


def test_exactly_a_n_b(counted, world):
    model, transport = counted
    optimizer = torch.optim.SGD(model.shard_parameters(), lr=0.1)
    for step in range(3):
        # Ranks run different numbers of microbatches, the first at some time none.
        totals = run_minibatch(model, (world.rank + step) % 3)
        assert totals.total("microbatches") == sum((rank + step) % 3 for rank in range(world.size))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        model.publish()
    assert transport.calls == ["A", "N", "B"] * 3
    assert transport.num_collectives == 9


def test_without_clipping_exactly_a_b(counted):
    model, transport = counted
    run_minibatch(model, 1)
    model.publish()
    assert transport.calls == ["A", "B"]
    assert transport.num_collectives == 2


@pytest.mark.mpi(min_size=2)
def test_nobody_waits_for_a_slow_rank_before_a(counted, world):
    model, transport = counted
    run_minibatch(model, 1)  # first touches are slow
    model.publish()
    transport.arrivals.clear()
    began = time.perf_counter()
    slow = world.rank == world.size - 1
    run_minibatch(model, 3, pause_s=0.6 if slow else 0.0)
    waited = transport.arrivals[0] - began
    left = time.perf_counter() - began
    model.publish()
    assert waited > 1.7 if slow else waited < 0.9, f"rank {world.rank} came to A after {waited:.2f} s"
    assert left > 1.7, "nobody may pass A before the slow rank has come"


def test_a_gradient_that_is_not_finite_is_known_to_all(counted, world):
    model, _ = counted
    with model.minibatch() as totals:
        scale = float("nan") if world.rank == world.size - 1 else 1.0
        (model(torch.randn(2, 16)).mean() * scale).backward()
    assert not totals.finite
    model.publish()
    assert run_minibatch(model, 1).finite, "the gradient window was not cleared"
    model.publish()

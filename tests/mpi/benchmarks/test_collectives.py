"""The collectives with which programs compare: blocking, and started several at a time."""

import pytest
import torch
from collectives import CollectiveCommunicator

NUMEL = 1000


@pytest.fixture
def collectives(world):
    made = CollectiveCommunicator(world)
    yield made
    made.free()


def test_gathers_and_sums_are_those_of_all_ranks(world, collectives):
    """Ranks contribute different values to each element. Of the started ones, two of each kind are in flight."""
    shard = torch.arange(NUMEL, dtype=torch.float32) + NUMEL * world.rank
    gradient = (world.rank + 1) * torch.arange(world.size * NUMEL, dtype=torch.float32)
    gathered = torch.arange(world.size * NUMEL, dtype=torch.float32)
    full, sums = torch.empty(3, world.size * NUMEL), torch.empty(3, NUMEL)
    collectives.all_gather(shard, full[0])
    collectives.reduce_scatter(gradient, sums[0])
    double_shard, double_gradient = 2 * shard, 2 * gradient
    requests = [
        collectives.start_all_gather(shard, full[1]),
        collectives.start_reduce_scatter(gradient, sums[1]),
        collectives.start_all_gather(double_shard, full[2]),
        collectives.start_reduce_scatter(double_gradient, sums[2]),
    ]
    for request in requests:
        world.wait_collective(request, "completing a collective of a test")
    total = sum(range(1, world.size + 1))
    for row, factor in enumerate((1, 1, 2)):
        assert torch.equal(full[row], factor * gathered)
        assert torch.equal(sums[row], factor * total * gathered[NUMEL * world.rank :][:NUMEL])

"""Small units, and gradients whose sums are exact, for tests of transports on any number of ranks."""

import numpy as np
import torch
from torch import nn


class Block(nn.Module):
    """A unit of a small model."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def stretches(sizes, rank, number):
    """Yield, for each array, a stretch of a gradient: index, start, integers, so that sums are exact in any order."""
    for index, numel in enumerate(sizes):
        rng = np.random.default_rng([rank, number, index])
        start, stop = sorted(rng.integers(0, numel + 1, size=2).tolist())
        yield index, start, torch.from_numpy(rng.integers(-1000, 1000, size=stop - start))


def assert_pushed(world, transport, sizes, numbers):
    """After A: every owner has the sums of what `stretches` yields for these numbers on all ranks, and no more."""
    wanted = [torch.zeros(numel, dtype=torch.float64) for numel in sizes]
    for rank in range(world.size):
        for number in numbers:
            for index, start, values in stretches(sizes, rank, number):
                wanted[index][start : start + len(values)] += values
    for index, layout in enumerate(transport.parameters.layouts):
        start, stop = layout.owned(world.rank)
        own = transport.gradients.shard(index)
        assert torch.equal(own[: stop - start].double(), wanted[index][start:stop])
        assert not own[stop - start :].any(), "padding was written to"

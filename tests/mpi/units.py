"""Small units, and gradients whose sums are exact, for tests of transports on any number of ranks."""

import time

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


def while_the_last_rank_computes(world, base, work):
    """Run `work` on the other ranks; the last one computes without calling MPI until all of them have returned."""
    computes = base.with_name(f"{base.name}.computes")
    if world.rank < world.size - 1:
        wait_for_file(computes)
        work()
        base.with_name(f"{base.name}.{world.rank}").touch()
        return
    computes.touch()
    deadline, done = time.monotonic() + 30, 0
    while done < world.size and time.monotonic() < deadline:
        torch.randn(1000).sum()
        done = len(list(base.parent.glob(f"{base.name}.*")))
    assert done == world.size, "a rank waited for one that computes"


def wait_for_file(path, poll=lambda: None):
    """Wait, without calling MPI unless `poll` does, until another rank has left its collectives and made a file."""
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        poll()
        time.sleep(1e-3)
    assert path.exists()


def assert_reports_and_sums(world, transport):
    reports = transport.complete_gradients(np.array([world.rank, 0.5]))
    assert reports.tolist() == [[rank, 0.5] for rank in range(world.size)]
    assert transport.group.norm(np.array([1.0, world.rank])).tolist() == [world.size, sum(range(world.size))]


def random_pushes(sizes, rank, number):
    """Yield, for each array, a stretch of a gradient: index, start, integers, so that sums are exact in any order."""
    for index, numel in enumerate(sizes):
        rng = np.random.default_rng([rank, number, index])
        start, stop = sorted(rng.integers(0, numel + 1, size=2).tolist())
        yield index, start, torch.from_numpy(rng.integers(-1000, 1000, size=stop - start))


def assert_pushed(world, transport, sizes, numbers):
    """Check complete gradients: owners have the sums of `random_pushes` for these numbers on all ranks, and no more."""
    wanted = [torch.zeros(numel, dtype=torch.float64) for numel in sizes]
    for rank in range(world.size):
        for number in numbers:
            for index, start, values in random_pushes(sizes, rank, number):
                wanted[index][start : start + len(values)] += values
    assert_sums(transport, wanted)


def assert_sums(transport, wanted):
    """Check this rank's shards of complete gradients against full arrays, and that their padding is zero."""
    for index, layout in enumerate(transport.parameters.layouts):
        start, stop = layout.owned(transport.group.rank)
        shard = transport.gradients.shard(index)
        assert torch.equal(shard[: stop - start].double(), wanted[index][start:stop].double())
        assert not shard[stop - start :].any(), "padding was written to"


def write_parameters(transport, values):
    """Write this rank's part of full arrays to its shards, and publish them."""
    for index, layout in enumerate(transport.parameters.layouts):
        start, stop = layout.owned(transport.group.rank)
        transport.parameters.shard(index)[: stop - start] = values[index][start:stop]
    transport.publish_parameters()


def assert_fetched(transport, values, indices=None):
    """Fetch arrays, by default all of them, and compare them with full arrays."""
    for index in range(len(values)) if indices is None else indices:
        fetched = transport.parameters.fetch(index).wait()
        assert torch.equal(fetched, values[index])
        transport.parameters.release(fetched)

"""Ranks that run different modules, call a head different numbers of times, or have no gradient, train as one does.

A parameter that no rank used in a minibatch has no gradient: optimizers leave it alone, as plain torch does.
"""

import copy

import pytest
import torch
from torch import nn

from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.settings import CommConfig
from odc_mpi.shard.cache_budget import CacheBytes
from odc_mpi.shard.model import ShardedModel

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]

WIDTH, STEPS, NUM_MICROBATCHES, MAX_NORM = 12, 5, 4, 0.2
#: Steps in which rank 0 has all microbatches, and those in which a loss is not finite: in one step both.
ONE_RANK, NOT_FINITE = (1, 2), (2, 3)


class Tower(nn.Linear):
    """As for images, which only microbatch 0 of every other step has."""


class Head(nn.Linear):
    """Called for a chunk of the tokens at a time."""


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.tower, self.head = nn.Linear(WIDTH, WIDTH), Tower(WIDTH, WIDTH), Head(WIDTH, 3)
        self.unused = Tower(WIDTH, WIDTH)

    def forward(self, x, has_image):
        hidden = torch.tanh(self.body(x))
        if has_image:
            hidden = hidden + torch.tanh(self.tower(x))
        # As many chunks as the microbatch has tokens for, each with its own call of the head.
        return sum(self.head(chunk).square().sum() for chunk in hidden.split(2))


def run_microbatches(network, step, numbers):
    for number in numbers:
        generator = torch.Generator().manual_seed(10 * step + number)
        x = torch.randn(1 + 3 * number, WIDTH, generator=generator, dtype=torch.float64)
        loss = network(x, number == 0 and step % 2 == 0)
        (loss * torch.nan if step in NOT_FINITE and number == 2 else loss).backward()


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def train_sharded(world, network, reduce_dtype=torch.float64, cache_bytes=0, prefetch=0, **options):
    """Return the parameters after all steps, and which steps were skipped."""
    transport = window_transport(world, torch.float64, reduce_dtype, CommConfig(**options))
    model = ShardedModel(copy.deepcopy(network), transport, units=[Tower, Head], prefetch=prefetch)
    model.cache_bytes = CacheBytes(cache_bytes, cache_bytes)
    optimizer, skipped = make_optimizer(model.shard_parameters()), []
    for step in range(STEPS):
        owners = [0 if step in ONE_RANK else number % world.size for number in range(NUM_MICROBATCHES)]
        with model.minibatch() as totals:
            run_microbatches(model, step, [number for number, rank in enumerate(owners) if rank == world.rank])
        is_used = {"tower": step % 2 == 0, "unused": False}
        for name, parameter in model.named_shard_parameters():
            assert (parameter.grad is not None) == (parameter.numel() > 0 and is_used.get(name.split(".")[0], True))
        model.clip_grad_norm_(MAX_NORM)
        skipped.append(not totals.finite)
        if totals.finite:
            optimizer.step()
        model.publish()
    state = model.state_dict()
    world.gather_objects(None)  # state_dict is one-sided: no rank frees windows that another still reads
    model.close()
    return state, skipped


def train_plain(network):
    optimizer = make_optimizer(network.parameters())
    for step in range(STEPS):
        run_microbatches(network, step, range(NUM_MICROBATCHES))
        if nn.utils.clip_grad_norm_(network.parameters(), MAX_NORM).isfinite():
            optimizer.step()
        optimizer.zero_grad()
    return network.state_dict()


@pytest.fixture
def network():
    torch.manual_seed(3)
    return Network().double()


@pytest.mark.parametrize(
    ("reduction", "prefetch", "cache_bytes"),
    [("accumulate", 0, (0, 0, 0)), ("mailbox", 1, (0, 2000, 1 << 30))],
    ids=["accumulate", "mailbox ahead, cached"],
)
def test_uneven_ranks_train_as_plain_torch_does(world, network, reduction, prefetch, cache_bytes):
    """Also with caches of unlike sizes on the ranks, of which the second has room for a tower."""
    options = {"reduction": reduction, "prefetch": prefetch, "cache_bytes": cache_bytes[world.rank]}
    state, skipped = train_sharded(world, network, zero_copy="off", **options)
    assert [step for step in range(STEPS) if skipped[step]] == list(NOT_FINITE)
    for name, value in train_plain(network).items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_uneven_ranks_change_no_bit_of_an_exact_run(world, network):
    state, skipped = train_sharded(world, network, torch.int64)
    alone, skipped_alone = train_sharded(world.split("self"), network, torch.int64)
    assert skipped == skipped_alone and sum(skipped) == len(NOT_FINITE)
    assert all(torch.equal(state[name], alone[name]) for name in state)
    assert not torch.equal(state["tower.weight"], network.tower.weight), "it was trained"

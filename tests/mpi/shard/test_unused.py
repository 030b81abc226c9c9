"""A parameter that no rank used in a minibatch has no gradient: optimizers leave it alone, as plain torch does."""

import copy
import functools

import pytest
import torch
from torch import nn

from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.reduce.accumulate import AccumulateGradientStore
from odc_mpi.comm.reduce.mailbox import MailboxGradientStore
from odc_mpi.shard.cache_budget import CacheBytes
from odc_mpi.shard.model import ShardedModel

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]

WIDTH, STEPS, MICROBATCHES, NUM_EXPERTS = 6, 15, 3, 5
NEVER, ONCE_A_STEP = 3, 4


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.scale


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.ones(NUM_EXPERTS))
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))
        self.experts[1].linear.bias.requires_grad_(False)

    def forward(self, x, chosen):
        return x + sum(self.gate[i] * self.experts[i](x) for i in chosen)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixture = Mixture()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, chosen):
        return self.head(self.mixture(x, chosen))


def minibatches():
    """The experts and inputs of every microbatch; the first three experts in turn, and the step in between none."""
    generator = torch.Generator().manual_seed(5)
    for step in range(STEPS):
        chosen = [[step // 2 % 3, *([ONCE_A_STEP] if i == step % MICROBATCHES else [])] for i in range(MICROBATCHES)]
        inputs = torch.randn((MICROBATCHES, 2, WIDTH), generator=generator, dtype=torch.float64)
        yield [] if step == 9 else list(zip(chosen, inputs, strict=True))


def owner_of(step, i, size):
    """The rank of a microbatch; in every fourth step the others have none."""
    return 0 if step % 4 == 1 else i % size


def loss_of(model, chosen, x):
    return model(x, chosen).square().mean()


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def train_plain(network):
    optimizer = make_optimizer(network.parameters())
    gradients = []
    for minibatch in minibatches():
        for chosen, x in minibatch:
            loss_of(network, chosen, x).backward()
        gradients.append({name for name, p in network.named_parameters() if p.grad is not None})
        nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def run_minibatch(model, minibatch, step, group):
    """Run this rank's microbatches."""
    with model.minibatch():
        for i, (chosen, x) in enumerate(minibatch):
            if owner_of(step, i, group.size) == group.rank:
                loss_of(model, chosen, x).backward()


ACCUMULATE = functools.partial(window_transport, reduction=AccumulateGradientStore, zero_copy=False)
MAILBOX = functools.partial(window_transport, reduction=MailboxGradientStore, zero_copy=False)


@pytest.mark.parametrize(
    ("make_transport", "unit", "prefetch", "cache_bytes"),
    [
        (ACCUMULATE, Mixture, 0, (0, 0, 0)),
        (ACCUMULATE, Expert, 1, (1 << 30, 1000, 0)),
        (MAILBOX, Expert, 1, (0, 1000, 1 << 30)),
    ],
    ids=["accumulate", "accumulate ahead, cached", "mailbox ahead, cached"],
)
def test_parameters_that_no_rank_used_are_left_alone(world, make_transport, unit, prefetch, cache_bytes):
    """Also with caches of unlike sizes on the ranks, of which the second has room for two experts."""
    torch.manual_seed(2)
    network = Network().double()
    reference = copy.deepcopy(network)
    wanted = train_plain(reference)
    transport = make_transport(world, param_dtype=torch.float64, reduce_dtype=torch.float64)
    model = ShardedModel(network, transport, units=[unit], prefetch=prefetch)
    model.cache_bytes = CacheBytes(cache_bytes[world.rank], cache_bytes[world.rank])
    optimizer = make_optimizer(model.shard_parameters())
    for step, minibatch in enumerate(minibatches()):
        run_minibatch(model, minibatch, step, transport.group)
        named = model.named_shard_parameters()
        owned = {name for name, p in named if p.numel()}
        assert {name for name, p in named if p.grad is not None} == wanted[step] & owned, f"step {step}"
        model.clip_grad_norm_(0.5)
        optimizer.step()
        model.publish()
    assert not any(optimizer.state.get(p) for name, p in named if f".{NEVER}." in name)
    state = model.state_dict()
    world.gather_objects(None)  # state_dict is one-sided: nobody frees windows that another still reads
    model.close()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")

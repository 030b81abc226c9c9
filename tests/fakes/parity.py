"""Train a module with plain torch and as shards, and compare."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from adversary import Adversary
from ranks import RecordingTransport, run_ranks
from torch import nn, optim
from toy_models import INPUT, Layer

from odc_mpi.shard.model import ShardedModel

#: Of a parameter in float64.
ITEM_BYTES = 8
Batch = tuple[Any, ...]  # arguments of one forward
Loss = Callable[[Any, Batch], torch.Tensor]  # of a module or a sharded model


def adamw(parameters):
    return optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def sgd(parameters):
    return optim.SGD(parameters, lr=0.05, momentum=0.9)


def squares(model, batch):
    output = model(*batch)
    return (output[0] if isinstance(output, tuple) else output).pow(2).mean()


def next_tokens(model, batch):
    (tokens,) = batch
    return nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def vectors(*shape, steps=3, microbatches=3, dtype=torch.float64):
    """Minibatches of random tensors; of the last step only the first microbatch, so that ranks have none."""
    minibatches = [[(torch.randn(shape, dtype=dtype),) for _ in range(microbatches)] for _ in range(steps)]
    return [*minibatches[:-1], minibatches[-1][:1]]


def tokens(vocabulary, steps=3, microbatches=3):
    """Minibatches of random tokens, each microbatch of another length."""
    return [
        [(torch.randint(vocabulary, (2, 3 + (step + i) % 4)),) for i in range(microbatches)] for step in range(steps)
    ]


def train_plain(module, minibatches, loss=squares, make_optimizer=adamw, max_norm=0.5):
    """Train in place; return the loss of every microbatch."""
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = make_optimizer(trained)
    losses = []
    for minibatch in minibatches:
        losses.append([])
        for batch in minibatch:
            value = loss(module, batch)
            value.backward()
            losses[-1].append(float(value.detach()))
        for p in (p for p in trained if p.grad is not None):  # a parameter that no microbatch used has no gradient
            p.grad = p.grad.to_dense()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(trained, max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_sharded(model, transport, minibatches, loss=squares, make_optimizer=adamw, max_norm=0.5, mark_last=False):
    """Train; return the loss of every microbatch of this rank by step and number.

    With `mark_last` the model is notified which backward is this rank's last in a minibatch.
    """
    optimizer = make_optimizer(model.shard_parameters())
    losses = {}
    for step, minibatch in enumerate(minibatches):
        of_rank = [i for i in range(len(minibatch)) if (step + i) % transport.group.size == transport.group.rank]
        with model.minibatch():
            for i in of_rank:
                if mark_last and i == of_rank[-1]:
                    model.set_is_last_backward()
                value = loss(model, minibatch[i])
                value.backward()
                losses[step, i] = float(value.detach())
        if max_norm is not None:
            model.clip_grad_norm_(max_norm)
        optimizer.step()
        model.publish()
    return losses


class Train:
    """Trains a stack of equal layers on a rank."""

    def __init__(self, transport, module, budgets=None, units=(Layer,), **settings):
        self.transport = transport
        self.model = ShardedModel(copy.deepcopy(module), transport, units=units, **settings)
        if budgets is not None:
            self.model.cache_bytes = budgets
        self.optimizer = adamw(self.model.shard_parameters())

    def step(self, num_microbatches=2, mark_last=False, batch=INPUT):
        """Return the numbers of fetches and pushes."""
        self.transport.log.clear()
        with self.model.minibatch():
            for i in range(num_microbatches):
                if mark_last and i == num_microbatches - 1:
                    self.model.set_is_last_backward()
                squares(self.model, (batch,)).backward()
        self.optimizer.step()
        self.model.publish()
        return len(self.transport.names("fetch")), len(self.transport.names("push"))

    @property
    def shard_bytes(self):
        return sum(layout.shard_numel for layout in self.transport.layouts) * ITEM_BYTES


@dataclass
class Trained:
    """Results of a rank."""

    model: ShardedModel
    transport: RecordingTransport
    state: dict[str, torch.Tensor]
    losses: dict[tuple[int, int], float]


def check_parity(
    module,
    minibatches,
    size,
    *,
    units=None,
    activation_checkpointing=False,
    param_dtype=torch.float64,
    reduce_dtype=torch.float64,
    tolerance=1e-9,
    with_buffers=False,
    prefetch=0,
    budgets=None,
    kind=Adversary,
    **training,
):
    """Train a module, of `param_dtype`, on one process and over the adversary; fail where losses or parameters differ.

    With `budgets`, which gives a rank's, units stay and gradients are added up.
    """
    module = module.to(param_dtype)
    plain = copy.deepcopy(module)
    copies = [copy.deepcopy(module) for _ in range(size)]

    def work(transport):
        model = ShardedModel(
            copies[transport.group.rank],
            transport,
            units=units,
            activation_checkpointing=activation_checkpointing,
            prefetch=prefetch,
        )
        if budgets is not None:
            model.cache_bytes = budgets(transport.group.rank)
        losses = train_sharded(model, transport, minibatches, **training)
        return Trained(model, transport, model.state_dict(), losses)

    ranks = run_ranks(size, work, param_dtype, reduce_dtype, kind)
    training.pop("mark_last", None)
    expected_losses = train_plain(plain, minibatches, **training)
    losses = {key: value for rank in ranks for key, value in rank.losses.items()}
    assert sorted(losses) == [(step, i) for step, minibatch in enumerate(minibatches) for i in range(len(minibatch))]
    for (step, i), value in losses.items():
        assert math.isclose(value, expected_losses[step][i], rel_tol=tolerance, abs_tol=tolerance), (step, i)
    left_out = None if with_buffers else dict(plain.named_buffers())
    for rank in ranks:
        assert_same_state(rank.state, plain.state_dict(), tolerance, left_out)
    return ranks


def assert_same_state(state, expected, tolerance, left_out=None):
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        if name not in (left_out or {}):
            torch.testing.assert_close(
                state[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )

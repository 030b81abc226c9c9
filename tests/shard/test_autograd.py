import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import KeepingTransport, RecordingTransport, on_ranks, run_ranks
from torch import nn
from toy_models import INPUT, Layer, Stack

from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.shard.autograd import SavedTensorHooks, UnitForwards
from odc_mpi.shard.cache_budget import CacheBytes
from odc_mpi.shard.model import ShardedModel
from odc_mpi.shard.spans import SpanRecorder
from odc_mpi.shard.units.unit import Unit, UnitState
from odc_mpi.shard.units.unsharded import UnshardedUnits


def one_unit(transport: RecordingTransport) -> tuple[Unit, UnshardedUnits]:
    layout = FlatLayout.build("u0", [ParameterSpec("a", (3,), True)], transport.group.size)
    transport.allocate([layout])
    unit = Unit("u0", [layout], [0])
    return unit, UnshardedUnits([unit], transport, 0, SpanRecorder())


@contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@on_ranks(1)
def test_a_call_inside_a_call_of_the_same_unit(transport: RecordingTransport) -> None:
    unit, unsharded = one_unit(transport)
    calls = UnitForwards(unsharded, lambda *_: None)
    with calls.run(unit):
        outer = calls.parameter(unit, "a")
        with calls.run(unit):
            assert calls.parameter(unit, "a") is not outer
        assert calls.parameter(unit, "a") is outer
    assert calls.parameter(unit, "a") is not outer


def offload(model: Any, pointers: Callable[[], set[int]]) -> list[torch.Tensor]:
    """Run a forward and a backward under `save_on_cpu`. Return the activations that it got, and the gradient."""
    packed: list[tuple[int, torch.Tensor]] = []
    hooks, inputs = torch.autograd.graph.save_on_cpu(), INPUT.clone().requires_grad_()
    pack = hooks.pack_hook
    hooks.pack_hook = lambda t: packed.append((t.untyped_storage().data_ptr(), t.detach().clone())) or pack(t)
    with hooks:
        loss = model(inputs).square().sum()
    weights = pointers()
    loss.backward()
    assert inputs.grad is not None
    return [tensor for pointer, tensor in packed if pointer not in weights] + [inputs.grad, loss.detach()]


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
@pytest.mark.parametrize("kind", [RecordingTransport, KeepingTransport])
@on_ranks(1)
def test_hooks_outside_of_a_model_get_all_activations(transport: Any, kind: Any, cache_bytes: int) -> None:
    module = Stack(4).double()
    expected = offload(module, lambda: {p.untyped_storage().data_ptr() for p in module.parameters()})
    assert len(expected) > 6
    model = ShardedModel(copy.deepcopy(module), transport, units=[Layer])
    model.cache_bytes = CacheBytes(parameters=cache_bytes)

    def pointers() -> set[int]:
        unsharded = (unit for unit in model.units if unit.state is UnitState.UNSHARDED)
        windows = {transport.parameters.shard(i).untyped_storage().data_ptr() for i in range(len(model.layouts))}
        return windows | {array.untyped_storage().data_ptr() for unit in unsharded for array in unit.arrays}

    with model.minibatch():
        for _ in range(2):  # in the second one, all units may be unsharded already
            actual = offload(model, pointers)
    assert len(actual) == len(expected) and all(map(torch.equal, actual, expected))
    for name, slice_ in model.named_shard_parameters():
        torch.testing.assert_close(slice_.grad, 2 * module.get_parameter(name).grad.flatten())


@pytest.mark.parametrize(
    "function",
    [torch.exp, torch.sigmoid, torch.tanh, torch.sqrt, lambda t: t.softmax(-1), lambda t: t.relu(), lambda t: t * t],
    ids=["exp", "sigmoid", "tanh", "sqrt", "softmax", "relu", "product"],
)
@on_ranks(1)
def test_a_change_in_place_is_refused_as_by_torch(transport: RecordingTransport, function: Any) -> None:
    saved = SavedTensorHooks(one_unit(transport)[1])
    for through_hooks in (False, True):
        x = torch.ones(3, requires_grad=True)
        h = x * 2
        with saved.active() if through_hooks else torch.enable_grad():
            y = function(h)
        with torch.no_grad():
            y.add_(1.0)
            h.add_(1.0)
        with pytest.raises(RuntimeError, match=r"changed in place: .* version" if through_hooks else "inplace"):
            y.sum().backward()


class Token:
    """Lives as long as the autograd node that holds it."""


class Marker(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tokens: list[weakref.ref[Token]]) -> torch.Tensor:
        ctx.token = Token()
        tokens.append(weakref.ref(ctx.token))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class Saving(nn.Module):
    """Operations that save their own output, behind a marked node."""

    def __init__(self, tokens: list[weakref.ref[Token]]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tokens = tokens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Marker.apply(self.linear(x), self.tokens)
        return torch.sigmoid(x.tanh().exp()).softmax(-1).sqrt()


@pytest.mark.parametrize("with_backward", [False, True])
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_no_graph_outlives_its_output(with_backward: bool, activation_checkpointing: bool) -> None:
    tokens: list[weakref.ref[Token]] = []
    module = nn.Sequential(Saving(tokens), nn.Linear(4, 4), Saving(tokens)).double()

    def work(transport: RecordingTransport) -> None:
        model = ShardedModel(module, transport, units=[Saving], activation_checkpointing=activation_checkpointing)
        model(torch.ones(2, 4, dtype=torch.float64))  # the first checkpoint imports modules, which leaves frames behind
        with model.minibatch(), no_collection():
            tokens.clear()
            for _ in range(3):
                loss = model(torch.ones(2, 4, dtype=torch.float64)).sum()
                assert any(token() is not None for token in tokens)
                if with_backward:
                    loss.backward()
                del loss
                assert [token() for token in tokens] == [None] * len(tokens)

    run_ranks(1, work)
    assert len(tokens) == 6 * (2 if with_backward and activation_checkpointing else 1)

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
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
from odc_mpi.shard.units.unit import Unit, UnitState
from odc_mpi.shard.units.unsharded import UnshardedUnits


class Parts:
    """Units of a transport with the objects that autograd uses, and a list of pushed gradients."""

    def __init__(self, transport: RecordingTransport, *units: dict[str, tuple[tuple[int, ...], bool]]) -> None:
        self.units: list[Unit] = []
        layouts: list[FlatLayout] = []
        for i, parameters in enumerate(units):
            kinds = [
                [ParameterSpec(name, shape, kind) for name, (shape, trained) in parameters.items() if trained is kind]
                for kind in (True, False)
            ]
            own = [FlatLayout.build(f"u{i}", kind, transport.group.size) for kind in kinds if kind]
            self.units.append(Unit(f"u{i}", own, range(len(layouts), len(layouts) + len(own))))
            layouts += own
        transport.allocate(layouts)
        for i in range(len(layouts)):
            transport.parameters.shard(i).copy_(torch.arange(1.0, layouts[i].shard_numel + 1))
        self.pushed: list[tuple[str, dict[str, torch.Tensor | None]]] = []
        self.ready = UnshardedUnits(transport)
        self.calls = UnitForwards(self.ready, self.push)
        self.saved = SavedTensorHooks(self.ready)

    def push(
        self, unit: Unit, names: Sequence[str], gradients: Sequence[torch.Tensor | None], is_last_forward: bool
    ) -> None:
        self.pushed.append((unit.name, dict(zip(names, gradients, strict=True))))


VECTOR = ((3,), True)
FROZEN = ((3,), False)


@contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@on_ranks(1)
def test_one_call_hands_out_the_same_tensors_and_pushes_once(transport: RecordingTransport) -> None:
    parts = Parts(transport, {"a": VECTOR, "b": VECTOR, "c": VECTOR})
    (unit,) = parts.units
    with parts.calls.run(unit):
        a, b = (parts.calls.parameter(unit, name) for name in "ab")
        assert parts.calls.parameter(unit, "a") is a
        ((a * 2).sum() + (a * b.detach()).sum() + (b * 5).sum()).backward()
    ((name, gradients),) = parts.pushed
    assert name == "u0" and gradients["c"] is None
    assert torch.equal(gradients["a"], 2 + b.detach())
    assert torch.equal(gradients["b"], torch.full((3,), 5.0).double())


@on_ranks(1)
def test_a_call_inside_a_call_of_the_same_unit(transport: RecordingTransport) -> None:
    parts = Parts(transport, {"a": VECTOR})
    (unit,) = parts.units
    with parts.calls.run(unit):
        outer = parts.calls.parameter(unit, "a")
        with parts.calls.run(unit):
            assert parts.calls.parameter(unit, "a") is not outer
        assert parts.calls.parameter(unit, "a") is outer
    assert parts.calls.parameter(unit, "a") is not outer


@on_ranks(1)
def test_a_graph_saves_places_not_parameters(transport: RecordingTransport) -> None:
    """The graph keeps no unit unsharded, and the backward fetches what it needs."""
    parts = Parts(transport, *({f"p{i}": ((3, 3), True)} for i in range(6)))
    x = torch.ones(2, 3, dtype=torch.float64)
    with parts.saved.active():
        for i, unit in enumerate(parts.units):
            with parts.calls.run(unit):
                x = x @ parts.calls.parameter(unit, f"p{i}").t()
    shapes = 6 * [(3, 3)]
    assert parts.units[0].state is UnitState.SHARDED
    parts.ready.reshard_all()
    buffers = transport.parameters.buffers
    assert len(buffers._idle) == 2 and buffers.peak_bytes == 2 * 9 * 8  # nobody looks, all were used again
    x.sum().backward()
    assert [name for name, _ in parts.pushed] == ["u5", "u4", "u3", "u2", "u1", "u0"]
    assert [tuple(g.shape) for _, gradients in parts.pushed for g in gradients.values()] == shapes
    # The product's first factor needs no gradient, so the first weight is not needed again.
    assert transport.names("fetch") == [f"u{i}" for i in (0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1)]
    assert transport.parameters.buffers.peak_bytes == 2 * 9 * 8


@on_ranks(1)
def test_views_of_parameters_come_back_as_they_were(transport: RecordingTransport) -> None:
    parts = Parts(transport, {"a": ((4, 6), True)}, {"b": ((4, 6), True)}, {"c": VECTOR}, {"d": VECTOR})
    views = [lambda t: t.t()[1:, ::2], lambda t: t[2], lambda t: t.view(2, 2, 6)[:, 1].permute(1, 0), lambda t: t]
    for view in views:
        x = torch.ones((), dtype=torch.float64, requires_grad=True)
        with parts.saved.active(), parts.calls.run(parts.units[1]):
            parameter = parts.calls.parameter(parts.units[1], "b")
            expected = view(parameter.detach()).sum()
            loss = (view(parameter) * x).sum()
        del parameter
        for unit in (parts.units[2], parts.units[3], parts.units[0]):  # others take the memory
            parts.ready.unshard(unit)
        loss.backward()
        torch.testing.assert_close(x.grad, expected)


@on_ranks(1)
def test_hooks_of_others_see_every_tensor(transport: RecordingTransport) -> None:
    parts = Parts(transport, {"a": VECTOR})
    (unit,) = parts.units
    packed: list[torch.Tensor] = []
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with (
        parts.saved.active(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t),
        parts.calls.run(unit),
        parts.saved.active(),  # nested: stands back
    ):
        loss = (parts.calls.parameter(unit, "a") * x).sum()
    loss.backward()
    assert len(packed) == 2


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
        return windows.union(*(unit.storage_pointers() for unit in unsharded))

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
    saved = Parts(transport, {"a": VECTOR}).saved
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

"""The minibatch and its boundary, initial values, the state, the end."""

import copy
import threading
from typing import Any

import pytest
import torch
from parity import adamw, assert_same_state, sgd, squares, train_plain
from ranks import InPlaceTransport, KeepingTransport, RecordingTransport, on_ranks, run_ranks
from torch import nn, optim
from toy_models import INPUT, WIDTH, Block, Layer, RandomWeights, Stack, Transformer

from odc_mpi.shard.model import ShardedModel

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])


def stack(num_layers: int = 2) -> nn.Module:
    return Stack(num_layers).double()


def shard(module: nn.Module, transport: RecordingTransport, **settings: Any) -> ShardedModel:
    return ShardedModel(copy.deepcopy(module), transport, **{"units": [Layer], **settings})


def work_once(model: Any) -> None:
    squares(model, (INPUT,)).backward()


# Ordering


@pytest.fixture
def module() -> nn.Module:
    return stack()


@on_ranks(2)
def test_calls_in_the_wrong_order(transport: RecordingTransport, module: nn.Module) -> None:
    model = shard(module, transport)
    before = model.usage.num_collectives
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\): expected .*complete', got 'parameters pub"):
        model.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match=r"publish\(\): expected .*complete', got 'parameters published'"):
        model.publish()
    with model.minibatch():
        with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\): expected .*, got 'inside a minibatch'"):
            model.clip_grad_norm_(1.0)
        with pytest.raises(RuntimeError, match=r"publish\(\): expected .*, got 'inside a minibatch'"):
            model.publish()
        with pytest.raises(RuntimeError, match=r"minibatch\(\): expected .*'inside a minibatch'"), model.minibatch():
            raise AssertionError("entered")
        work_once(model)
    complete = r"minibatch\(\): expected the phase 'parameters published', got 'gradients complete'"
    with pytest.raises(RuntimeError, match=complete), model.minibatch():
        raise AssertionError("entered")
    assert model.usage.num_collectives == before + 1
    model.clip_grad_norm_(1.0)
    model.clip_grad_norm_(1.0)
    model.publish()
    with model.minibatch():
        work_once(model)
    model.publish()


@on_ranks(1)
def test_backward_at_the_wrong_time(transport: RecordingTransport, module: nn.Module) -> None:
    model = shard(module, transport)
    outside = "backward outside of `with model.minibatch\\(\\):`"
    with pytest.raises(RuntimeError, match=outside):
        work_once(model)
    with model.minibatch():
        late, later, latest = (squares(model, (INPUT,)) for _ in range(3))
        work_once(model)
    gradients = [p.grad.clone() for p in model.shard_parameters()]
    for use in (late.backward, lambda: model(INPUT), model.state_dict):
        with pytest.raises(RuntimeError, match=r"evaluate or save after publish\(\)"):
            use()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.shard_parameters(), gradients, strict=True))
    model.publish()
    with pytest.raises(RuntimeError, match=r"backward after publish\(\)"):
        later.backward()
    with model.minibatch():
        assert not any(transport.gradients.shard(i).any() for i in range(len(transport.parameters.layouts)))
        with pytest.raises(RuntimeError, match=r"backward after publish\(\)"):
            latest.backward()
    model.publish()
    with pytest.raises(RuntimeError, match=outside):
        work_once(model)


@on_ranks(1)
def test_an_optimizer_steps_between_complete_gradients_and_publication_only(
    transport: RecordingTransport, module: nn.Module
) -> None:
    model = shard(module, transport)
    optimizer = torch.optim.SGD(model.shard_parameters(), lr=0.1)
    for parameter in model.shard_parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="an optimizer's step: expected the phase 'gradients complete'"):
        optimizer.step()
    with model.minibatch():
        work_once(model)
    optimizer.step()
    model.publish()
    assert all(parameter.grad is None for parameter in model.shard_parameters())
    with model.minibatch():
        work_once(model)
        arrived = [transport.gradients.shard(i).clone() for i in range(len(transport.parameters.layouts))]
        optimizer.zero_grad(set_to_none=False)
        assert all(torch.equal(transport.gradients.shard(i), wanted) for i, wanted in enumerate(arrived))
    model.publish()


@pytest.mark.parametrize("given", ["placeholders", "originals", "one placeholder among slices"])
@on_ranks(1)
def test_an_optimizer_over_the_module_s_parameters_is_refused(
    transport: RecordingTransport, given: str, module: nn.Module
) -> None:
    copied = copy.deepcopy(module)
    early = optim.AdamW(copied.parameters())
    model = ShardedModel(copied, transport, units=[Layer])
    mixed = [*model.shard_parameters(), next(iter(copied.parameters()))]
    optimizer = {
        "placeholders": optim.AdamW(model.module.parameters()),
        "originals": early,
        "one placeholder among slices": optim.AdamW(mixed),
    }[given]
    with model.minibatch():
        work_once(model)
    with pytest.raises(RuntimeError, match=r"given first.weight of .*give the optimizer model.shard_parameters"):
        optimizer.step()
    optim.AdamW(model.shard_parameters()).step()
    optim.AdamW(module.parameters()).step()  # of a module that is not sharded


@on_ranks(1)
def test_freezing_after_sharding_is_refused(transport: RecordingTransport, module: nn.Module) -> None:
    module.layers[0].linear.weight.requires_grad_(False)
    model = shard(module, transport)
    model.module.layers[1].requires_grad_(False)
    frozen = r"layers.1.linear.weight was frozen after shard_model.*: set requires_grad before shard_model"
    with pytest.raises(RuntimeError, match=frozen), model.minibatch():
        raise AssertionError("entered")
    model.module.layers.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"layers.0.linear.weight was made trainable"), model.minibatch():
        raise AssertionError("entered")
    for name, parameter in model.module.named_parameters():
        parameter.requires_grad_(name != "layers.0.linear.weight")
    with model.minibatch():
        work_once(model)
    model.publish()


@pytest.mark.parametrize("kind", [RecordingTransport, InPlaceTransport, KeepingTransport])
@on_ranks(1)
def test_gradients_of_inputs_alone_are_refused_after_a_publication(transport: Any, kind: Any) -> None:
    """No gradient reaches a parameter, and views of the window show the new values."""
    model = shard(WithDict(), transport)
    inputs = INPUT.clone().requires_grad_()
    with model.minibatch():
        losses = model(inputs)["y"].sum(), model.module.layer(inputs).sum()
        alone = (inputs @ model.module.layer.linear.weight).sum()
    model.publish()
    for loss in losses:
        with pytest.raises(RuntimeError, match=r"backward after publish\(\)"):
            torch.autograd.grad(loss, inputs)
    if kind is KeepingTransport:  # otherwise the old values are kept
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(alone, inputs)


class WithDict(nn.Module):
    """Returns a dictionary, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.layer = stack(), Layer().double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.stack(self.layer(x))}


class Changing(nn.Module):
    """Changes its own parameters in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.change = lambda linear: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self.linear)
        return self.linear(x)


CHANGES = {
    "with a graph": lambda linear: linear.weight.mul_(2.0),
    "without a graph": torch.no_grad()(lambda linear: linear.weight[0].clamp_(-0.01, 0.01)),
    "in inference mode": torch.inference_mode()(lambda linear: linear.weight.zero_()),
    "a frozen one": lambda linear: linear.bias.add_(1.0),
}


@pytest.mark.parametrize("kind", [RecordingTransport, InPlaceTransport])
@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("activation_checkpointing", [False, True])
@on_ranks(1)
def test_a_parameter_changed_in_its_unit_is_refused(
    transport: RecordingTransport, kind: Any, how: str, activation_checkpointing: bool
) -> None:
    module = nn.Sequential(Changing(), Changing()).double()
    module[1].linear.bias.requires_grad_(False)
    name = "1.linear.bias" if how == "a frozen one" else "1.linear.weight"
    model = shard(module, transport, units=[Changing], activation_checkpointing=activation_checkpointing)
    with model.minibatch():
        work_once(model)
    model.publish()
    model.module[1].change = CHANGES[how]
    with pytest.raises(RuntimeError, match=f"{name} was changed in place.*before shard_model"), model.minibatch():
        work_once(model)
    model.close()


@pytest.mark.parametrize("kind", [RecordingTransport, InPlaceTransport])
@pytest.mark.parametrize(
    "change",
    [
        lambda module: nn.init.normal_(module.layers[0].linear.weight),
        lambda module: module.layers[0].linear.weight.detach().t().zero_(),
    ],
)
@pytest.mark.parametrize("when", ["before a minibatch", "inside", "before a forward"])
@on_ranks(1)
def test_a_parameter_changed_from_outside_is_refused(
    transport: RecordingTransport, kind: Any, change: Any, when: str
) -> None:
    model = shard(stack(4), transport)
    if when != "inside":
        change(model.module)
    with pytest.raises(RuntimeError, match=r"layers.0.linear.weight was changed in place"):
        if when == "before a forward":
            model(INPUT)
        with model.minibatch():
            assert when == "inside", "entered"
            work_once(model)
            change(model.module)
    model.close()


@on_ranks(1)
def test_a_new_parameter_cannot_take_a_sharded_ones_place(transport: RecordingTransport) -> None:
    model = ShardedModel(nn.Linear(2, 2), transport)
    with pytest.raises(RuntimeError, match="weight is sharded"):
        model.module.weight = nn.Parameter(torch.zeros(2, 2))


@SIZES
@on_ranks()
def test_an_exception_in_a_minibatch_skips_collectives(
    transport: RecordingTransport, size: int, module: nn.Module
) -> None:
    model = shard(module, transport)
    before = model.usage.num_collectives
    with pytest.raises(ZeroDivisionError), model.minibatch():
        work_once(model)
        raise ZeroDivisionError
    assert model.usage.num_collectives == before
    with pytest.raises(RuntimeError, match="inside a minibatch"):
        model.publish()


@on_ranks(1)
def test_a_forward_that_failed_leaves_nothing_behind(transport: RecordingTransport) -> None:
    class Failing(Layer):
        fail = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if self.fail:
                raise MemoryError
            return y

    module = nn.Sequential(*(Failing() for _ in range(4))).double()
    plain = copy.deepcopy(module)
    train_plain(plain, [[(INPUT,)]], make_optimizer=sgd, max_norm=None)
    model = shard(module, transport, units=[Failing])
    optimizer = sgd(model.shard_parameters())
    with model.minibatch():
        model.module[2].fail = True
        with pytest.raises(MemoryError):
            work_once(model)
        model.module[2].fail = False
        assert all(unit.num_running_forwards == 0 for unit in model.units)
        work_once(model)
    optimizer.step()
    model.publish()
    assert_same_state(model.state_dict(), plain.state_dict(), 1e-12)


# Initial values


@SIZES
def test_rank_0_s_values_count(size: int) -> None:
    modules = [Transformer(2, tied=True) for _ in range(4)]
    for i, module in enumerate(modules):
        module.register_buffer("scale", torch.full((3,), float(i)))
        module.register_buffer("table", torch.arange(6.0).view(2, 3).t() + i, persistent=False)
        module.steps = nn.Parameter(torch.tensor([i, i]), requires_grad=False)
    expected = copy.deepcopy(modules[0]).double()

    def work(transport: RecordingTransport) -> None:
        module = modules[transport.group.rank].double()
        model = ShardedModel(module, transport)
        assert_same_state(model.state_dict(), expected.state_dict(), 0.0)
        assert torch.equal(module.table, expected.table) and torch.equal(module.steps, expected.steps)

    run_ranks(size, work)


@SIZES
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_weights_from_elsewhere_are_read_slice_by_slice(size: int, device: str) -> None:
    with torch.device(device):
        modules = [Transformer(2, tied=True) for _ in range(size)]
    numels = {name: p.numel() for name, p in modules[0].named_parameters()}

    def work(transport: RecordingTransport) -> list[tuple[str, int, int]]:
        module = modules[transport.group.rank]
        drawn = RandomWeights({name: p.shape for name, p in module.named_parameters()})
        transport.broadcast = None  # type: ignore
        model = ShardedModel(module, transport, weights=drawn)
        state = model.state_dict()
        for name, value in drawn.values.items():
            assert torch.equal(state[name], value.double())
        assert torch.isfinite(model(torch.tensor([[1, 2, 3]]))).all()
        return drawn.reads

    reads = run_ranks(size, work)
    names = [name for name, _, _ in reads[0]]
    assert sorted(names) == sorted(numels)
    assert all([name for name, _, _ in of_rank] == names for of_rank in reads)
    for i, name in enumerate(names):
        assert [k for of_rank in reads for k in range(*of_rank[i][1:])] == list(range(numels[name]))


@pytest.mark.parametrize("param_dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@on_ranks(2, reduce_dtype=torch.float32)
def test_the_optimizer_sees_fp32_at_least(transport: RecordingTransport, param_dtype: torch.dtype) -> None:
    module, master = with_buffers(tied=False), torch.promote_types(param_dtype, torch.float32)
    drawn = RandomWeights({name: p.shape for name, p in module.named_parameters() if p.is_floating_point()})
    model = shard(module, transport, units=[Block], weights=drawn)
    state = model.state_dict()
    windows = {transport.parameters.shard(i).untyped_storage().data_ptr() for i in range(len(model.layouts))}
    for slice_, tensor in model.slices():
        full, value = state[slice_.spec.name], drawn.values[slice_.spec.name]
        assert full.dtype == param_dtype and torch.equal(full, value.to(param_dtype))
        # The master keeps what the window has no bits for.
        expected_dtype = master if slice_.spec.requires_grad else param_dtype
        assert tensor.dtype == expected_dtype and torch.equal(
            tensor, value.flatten()[slice_.start : slice_.stop].to(expected_dtype)
        )
        assert (tensor.untyped_storage().data_ptr() in windows) is (expected_dtype == param_dtype)


def with_parameter(parameter: torch.Tensor) -> nn.Module:
    module = nn.Linear(2, 2)
    module.turn = nn.Parameter(parameter)
    return module


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: with_parameter(torch.ones(2, device="meta")), "turn is on the meta device: expected `weights`"),
        (lambda: with_parameter(torch.ones(2, dtype=torch.complex64)), "turn"),  # would not be trained
        (lambda: nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)), "max_norm"),  # a forward changes the weights
    ],
)
@on_ranks(1)
def test_a_module_that_cannot_be_sharded(transport: RecordingTransport, make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ShardedModel(make(), transport)
    assert transport.parameters.layouts == ()


# The state and the module itself


def with_buffers(tied: bool) -> nn.Module:
    module = Transformer(2, tied=tied)
    module.register_buffer("steps", torch.tensor(7))
    module.blocks[0].register_buffer("mask", torch.eye(3))
    module.blocks[1].register_buffer("scratch", torch.eye(3), persistent=False)
    module.blocks[1].flag = nn.Parameter(torch.tensor([True]), requires_grad=False)
    module.blocks[0].scale = nn.Parameter(torch.tensor(0.5))
    module.blocks[0].qkv.weight.requires_grad_(False)
    return module


@SIZES
@pytest.mark.parametrize("tied", [False, True])
def test_the_state_is_the_plain_module_s(size: int, tied: bool) -> None:
    module = with_buffers(tied).double()
    expected = module.state_dict()
    assert "blocks.1.scratch" not in expected and "blocks.1.flag" in expected

    def work(transport: RecordingTransport) -> None:
        model = shard(module, transport, units=[Block])
        state = model.state_dict()
        assert_same_state(state, expected, 0.0)
        assert [value.dtype for value in state.values()] == [value.dtype for value in expected.values()]
        assert not any(value.requires_grad for value in state.values())
        copy.deepcopy(module).load_state_dict(state)
        # A copy: changing it changes nothing.
        for value in state.values():
            value.zero_()
        assert_same_state(model.state_dict(), expected, 0.0)

    run_ranks(size, work)


def test_one_rank_alone_may_ask_for_the_state() -> None:
    module, requested = stack(), threading.Event()

    def work(transport: RecordingTransport) -> None:
        model = shard(module, transport)
        if transport.group.rank == 1:
            assert_same_state(model.state_dict(), module.state_dict(), 0.0)
            requested.set()
        assert requested.wait(10.0)

    run_ranks(2, work)


@on_ranks(1)
def test_a_state_of_a_part_that_is_not_a_tensor(transport: RecordingTransport) -> None:
    class Noted(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"note": [1, 2]}

    state = ShardedModel(Noted(2, 2).double(), transport, units=[]).state_dict()
    assert state["_extra_state"] == {"note": [1, 2]}


@on_ranks(1)
def test_the_module_s_own_state_and_parameters_are_refused(transport: RecordingTransport, module: nn.Module) -> None:
    model = shard(module, transport)
    with pytest.raises(RuntimeError, match="parameters are sharded: expected state_dict"):
        model.module.state_dict()
    model.state_dict()
    for part in (model.module, model.module.layers[1]):
        with pytest.raises(RuntimeError, match="parameters are sharded: expected state_dict"):
            part.state_dict()
    with pytest.raises(TypeError, match=r"give the optimizer model.shard_parameters\(\)"):
        optim.SGD(model.parameters())


@on_ranks(1)
def test_train_and_eval_reach_the_module(transport: RecordingTransport) -> None:
    model = shard(stack(), transport)
    assert model.eval() is model and not model.module.layers[0].training
    assert model.train() is model and model.module.layers[0].training


@on_ranks(1)
def test_hooks_of_modules_run(transport: RecordingTransport, module: nn.Module) -> None:
    seen: list[str] = []
    model = shard(module, transport)
    layer = model.module.layers[1]
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_forward_hook(lambda *_: seen.append("after"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    with model.minibatch():
        work_once(model)
    assert seen == ["before", "after", "backward"]


# Buffers


@SIZES
@on_ranks()
def test_buffers_are_the_rank_s_own(transport: RecordingTransport, size: int) -> None:
    """Each rank's are those of a plain module that has seen the rank's microbatches."""
    module = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    model = shard(module, transport, units=[nn.BatchNorm1d])
    rank, plain = transport.group.rank, copy.deepcopy(module)
    for _ in range(2):
        with model.minibatch():
            for i in range(rank + 1):
                squares(model, (INPUT * (i + rank + 1),)).backward()
                plain(INPUT * (i + rank + 1))
        model.publish()
    state = model.state_dict()
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.module.get_buffer(name), buffer, msg=name)
        assert torch.equal(state[name], model.module.get_buffer(name))


def test_sums_are_as_precise_as_reduce_dtype() -> None:
    """A thousandth part of each of many microbatches counts beside one large gradient, in fp64 only."""
    module = nn.Linear(1, 1, bias=False)

    def work(transport: RecordingTransport) -> float:
        model = shard(module, transport, units=[])
        with model.minibatch():
            for factor in [2.0**24, *[1.0] * 8, -(2.0**24)]:
                model(torch.full((1, 1), factor, dtype=transport.parameters.dtype)).sum().backward()
        return float(torch.cat([p.grad for p in model.shard_parameters()])[0])

    assert run_ranks(1, work, torch.float32, torch.float64) == [8.0]
    assert run_ranks(1, work, torch.float32, torch.float32) == [0.0]
    assert run_ranks(1, work, torch.float64, torch.float32) == [0.0]


# The end


@SIZES
@on_ranks()
def test_closing_keeps_the_slices(transport: RecordingTransport, size: int, module: nn.Module) -> None:
    model = shard(module, transport)
    optimizer = adamw(model.shard_parameters())
    with model.minibatch():
        work_once(model)
    optimizer.step()
    model.publish()
    with model.minibatch():
        work_once(model)
    slices = model.shard_parameters()
    assert all(p.grad is not None for p in slices if p.numel())
    before = [p.detach().clone() for p in slices]
    windows = [transport.parameters.shard(i) for i in range(len(model.layouts))]
    assert transport.group.rank or any(p.numel() for p in slices)
    transport.publish_parameters()  # all have looked
    model.close()
    for window in windows:
        window.fill_(float("nan"))
    assert all(torch.equal(p.detach(), b) and p.grad is None for p, b in zip(slices, before, strict=True))
    assert model.shard_parameters() == []
    assert transport.parameters._shards == {}
    model.close()
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in slices]


@pytest.mark.parametrize("kind", [RecordingTransport, InPlaceTransport])
@on_ranks(1)
def test_a_closed_model_is_refused(transport: Any, kind: Any, module: nn.Module) -> None:
    model = shard(module, transport)
    with model.minibatch():
        loss, gradient_of_input = squares(model, (INPUT,)), squares(model, (INPUT.clone().requires_grad_(),))
    model.publish()
    model.close()
    for use in (
        lambda: model(INPUT),
        lambda: model.module.layers[0](INPUT),
        lambda: model.module.layers[0].linear.weight,
        lambda: model.minibatch().__enter__(),
        model.publish,
        model.state_dict,
        loss.backward,
        gradient_of_input.backward,
    ):
        with pytest.raises(RuntimeError, match=r"after (publish\(\) or )?close\(\)|got 'closed'"):
            use()


@on_ranks(1)
def test_a_module_is_sharded_once(transport: RecordingTransport, module: nn.Module) -> None:
    model = shard(module, transport)
    for _ in range(2):
        for again in (model.module, model.module.layers[1], nn.Sequential(nn.ReLU(), model.module)):
            with pytest.raises(ValueError, match="was sharded before and no longer has its parameters"):
                ShardedModel(again, transport, units=[])
        model.close()

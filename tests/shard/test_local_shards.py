import pytest
import torch
from ranks import RecordingTransport, on_ranks, run_ranks
from torch import nn
from toy_models import RandomWeights

from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.shard.gradient_format.floating_point import FloatGradients
from odc_mpi.shard.local_shards import LocalShards, ModuleWeightSource
from odc_mpi.shard.partition import UnitParameters

SHAPES = {"a": (5, 7), "b": (), "c": (0, 2), "d": (70,)}
FROZEN = {"f": (3, 4)}
ALL = SHAPES | FROZEN
SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])


def make_slices(transport: RecordingTransport) -> tuple[LocalShards, list[FlatLayout]]:
    layouts = [
        FlatLayout.build(
            "t", [ParameterSpec(name, shape, True) for name, shape in SHAPES.items()], transport.group.size
        ),
        FlatLayout.build(
            "f", [ParameterSpec(name, shape, False) for name, shape in FROZEN.items()], transport.group.size
        ),
    ]
    transport.allocate(layouts)
    return LocalShards(transport, layouts, torch.device("cpu")), layouts


def whole(transport: RecordingTransport, layouts: list[FlatLayout]) -> dict[str, torch.Tensor]:
    """All parameters as others see them."""
    found = {}
    for i, layout in enumerate(layouts):
        flat = transport.parameters.fetch(i).wait()
        found |= {slot.spec.name: flat[slot.start : slot.stop].view(slot.spec.shape) for slot in layout.ranges}
    return found


@SIZES
def test_weights_are_read_once_and_shown_to_all(size: int) -> None:
    def work(transport: RecordingTransport) -> list[tuple[str, int, int]]:
        slices, layouts = make_slices(transport)
        table = RandomWeights(ALL)
        slices.load(table)
        slices.write_back()
        transport.publish_parameters()
        for name, value in whole(transport, layouts).items():
            assert torch.equal(value, table.values[name].double())
        return table.reads

    reads = run_ranks(size, work)
    for own in reads:
        assert [name for name, _, _ in own] == list(ALL)
    for i, name in enumerate(ALL):
        elements = [k for own in reads for k in range(*own[i][1:])]
        assert elements == list(range(RandomWeights(ALL).values[name].numel()))


@SIZES
def test_all_ranks_have_the_same_list_of_slices(size: int) -> None:
    def work(transport: RecordingTransport) -> list[tuple[str, int]]:
        slices, _ = make_slices(transport)
        assert all(own.parameter.shape == (own.slice.numel,) for own in slices.trainable)
        return [(own.slice.spec.name, own.slice.numel) for own in slices.trainable]

    ranks = run_ranks(size, work)
    assert all([name for name, _ in own] == list(SHAPES) for own in ranks)
    assert [sum(own[i][1] for own in ranks) for i in range(4)] == [35, 1, 0, 70]


@pytest.mark.parametrize(
    ("param_dtype", "master"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
@on_ranks(2, reduce_dtype=torch.float32)
def test_the_optimizer_sees_fp32_at_least(
    transport: RecordingTransport, param_dtype: torch.dtype, master: torch.dtype
) -> None:
    slices, layouts = make_slices(transport)
    table = RandomWeights(ALL)
    slices.load(table)
    assert {own.parameter.dtype for own in slices.trainable} == {master}
    slices.write_back()
    transport.publish_parameters()
    for name, value in whole(transport, layouts).items():
        assert value.dtype == param_dtype and torch.equal(value, table.values[name].to(param_dtype))
    for own in slices.trainable:
        # The master keeps what the window has no bits for.
        expected = table.values[own.slice.spec.name].flatten()[own.slice.start : own.slice.stop].to(master)
        assert torch.equal(own.parameter.detach(), expected)
        shared = (
            own.parameter.untyped_storage().data_ptr() == transport.parameters.shard(0).untyped_storage().data_ptr()
        )
        assert shared is (param_dtype == master)


@on_ranks(2, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
def test_small_steps_add_up_in_the_master(transport: RecordingTransport) -> None:
    slices, layouts = make_slices(transport)
    for own in slices.trainable:
        own.parameter.data.fill_(1.0)
    for _ in range(100):
        for own in slices.trainable:
            own.parameter.data.add_(1e-4)  # bf16 has steps of 2**-7 after 1
        slices.write_back()
    transport.publish_parameters()
    assert float(whole(transport, layouts)["b"]) == float(torch.tensor(1.01).bfloat16())


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "casts"),
    [
        (torch.float32, torch.float32, False),
        (torch.bfloat16, torch.float32, False),
        (torch.float64, torch.float64, False),
        (torch.float32, torch.float64, True),
        (torch.float64, torch.float32, True),
    ],
)
@on_ranks(3)
def test_grad_shows_what_has_arrived_and_writing_clears_it(
    transport: RecordingTransport, param_dtype: torch.dtype, reduce_dtype: torch.dtype, casts: bool
) -> None:
    slices, layouts = make_slices(transport)
    gradient = torch.arange(float(layouts[0].numel), dtype=reduce_dtype)
    assert all(own.parameter.grad is None for own in slices.trainable)
    if transport.group.rank == 0:
        transport.gradients.push(0, gradient)
    transport.publish_parameters()
    slices.attach_gradients([True] * len(slices.trainable), FloatGradients(torch.float32))
    for own, slot in zip(slices.trainable, layouts[0].ranges, strict=True):
        assert own.parameter.grad.dtype == own.parameter.dtype
        expected = gradient[slot.start + own.slice.start : slot.start + own.slice.stop]
        assert torch.equal(own.parameter.grad, expected.to(own.parameter.dtype))
        window = transport.gradients.shard(own.index)
        shared = own.parameter.grad.untyped_storage().data_ptr() == window.untyped_storage().data_ptr()
        assert shared is not casts
    slices.write_back()
    assert not transport.gradients.shard(0).any()


@on_ranks(3)
def test_parameters_without_a_push_have_no_gradient(transport: RecordingTransport) -> None:
    slices, layouts = make_slices(transport)
    names = [slot.spec.name for layout in layouts if layout.trainable for slot in layout.ranges]
    assert [own.slice.spec.name for own in slices.trainable] == names
    pushed = [name == names[0] for name in names]
    slices.attach_gradients(pushed, FloatGradients(torch.float32))
    assert [own.parameter.grad is not None for own in slices.trainable] == pushed


@on_ranks(2)
def test_detached_slices_keep_their_values_and_let_the_windows_go(transport: RecordingTransport) -> None:
    slices, _ = make_slices(transport)
    slices.load(RandomWeights(ALL))
    parameters = [own.parameter for own in slices.trainable]
    slices.attach_gradients([True] * len(slices.trainable), FloatGradients(torch.float32))
    before = [p.detach().clone() for p in parameters]
    slices.detach()
    transport.parameters.shard(0).fill_(float("nan"))
    assert all(torch.equal(p.detach(), b) for p, b in zip(parameters, before, strict=True))
    assert all(p.grad is None for p in parameters)
    assert slices.trainable == []


@SIZES
@on_ranks()
def test_module_weights_are_rank_0_s(transport: RecordingTransport, size: int) -> None:
    transport.allocate([])
    parameter = nn.Parameter(torch.full((3, 4), float(transport.group.rank)) + torch.arange(4.0))
    transposed = nn.Parameter(torch.full((2, 3), float(transport.group.rank)).t())
    unit = UnitParameters("u", {"p": parameter, "t": transposed})
    weights = ModuleWeightSource([unit], transport.group)
    start, stop = 2 + transport.group.rank, 7 + transport.group.rank  # each rank its own part
    assert torch.equal(weights.read("p", start, stop), torch.arange(4.0).repeat(3)[start:stop])
    assert torch.equal(weights.read("t", 0, 0), torch.empty(0))

import pytest
import torch
from ranks import RecordingTransport, on_ranks
from toy_models import RandomWeights

from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.shard.local_shards import LocalShards

SHAPES = {"a": (5, 7), "b": (), "c": (0, 2), "d": (70,)}
FROZEN = {"f": (3, 4)}
ALL = SHAPES | FROZEN


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

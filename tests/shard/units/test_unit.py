from collections.abc import Sequence

import pytest
import torch
from ranks import RecordingTransport, on_ranks
from torch import nn

from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.shard.modules import OnDemandParameters, placeholder
from odc_mpi.shard.units.unit import Unit, UnitState
from odc_mpi.shard.units.unsharded import MAX_UNSHARDED_UNITS, UnshardedUnits


def specs(name: str, *shapes: tuple[int, ...], trainable: bool = True) -> list[ParameterSpec]:
    return [ParameterSpec(f"{name}.{i}", shape, trainable) for i, shape in enumerate(shapes)]


def host(transport: RecordingTransport, parts: Sequence[tuple[str, Sequence[list[ParameterSpec]]]]) -> list[Unit]:
    """Units of the given arrays; every element of every array has a value of its own, and padding is -1."""
    units: list[Unit] = []
    layouts: list[FlatLayout] = []
    for name, arrays in parts:
        own = [FlatLayout.build(name or "(root)", array, transport.group.size) for array in arrays]
        units.append(Unit(name, own, range(len(layouts), len(layouts) + len(own))))
        layouts += own
    transport.allocate(layouts)
    for i, layout in enumerate(layouts):
        transport.parameters.shard(i).fill_(-1)
        for interval in layout.slices(transport.group.rank):
            values = torch.arange(interval.start, interval.stop) + value_of(interval.spec.name)
            transport.parameters.shard(i)[interval.offset : interval.offset + interval.numel] = values
    transport.publish_parameters()
    return units


def value_of(name: str) -> int:
    return sum(map(ord, name)) * 1000


def simple(transport: RecordingTransport, count: int) -> tuple[list[Unit], UnshardedUnits]:
    """A root and some units of one array."""
    names = ["", *(f"u{i}" for i in range(count))]
    return host(transport, [(name, [specs(name, (3, 5), (7,))]) for name in names]), UnshardedUnits(transport)


def states(units: Sequence[Unit]) -> str:
    return "".join(unit.state.value[0] for unit in units)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@on_ranks()
def test_an_unsharded_unit_has_every_full_parameter(transport: RecordingTransport, size: int) -> None:
    shapes = [(), (0, 3), (5, 7), (33,), (2, 3, 4)]
    (unit,) = host(transport, [("u", [specs("t", *shapes), specs("f", (3,), (40,), trainable=False)])])
    UnshardedUnits(transport).unshard(unit)
    assert list(unit.ranges) == ["t.0", "t.1", "t.2", "t.3", "t.4", "f.0", "f.1"]
    for name, (_, slot) in unit.ranges.items():
        parameter = unit.parameter(name)
        expected = (torch.arange(slot.spec.numel) + value_of(name)).double().view(slot.spec.shape)
        assert torch.equal(parameter, expected)
        assert parameter.is_contiguous() and not parameter.requires_grad and parameter.grad_fn is None


@on_ranks(2)
def test_a_unit_s_states(transport: RecordingTransport) -> None:
    (unit,), _ = simple(transport, 0)
    assert unit.is_root and unit.state is UnitState.SHARDED and unit.storage_pointers() == []
    unit.start_fetch(transport.parameters.fetch)
    assert unit.state is UnitState.FETCHING
    with pytest.raises(AssertionError):
        unit.start_fetch(transport.parameters.fetch)
    with pytest.raises(AssertionError):
        unit.reshard(transport)
    unit.wait()
    assert unit.state is UnitState.UNSHARDED and len(unit.storage_pointers()) == 1
    with pytest.raises(AssertionError):
        unit.wait()
    unit.reshard(transport)
    assert unit.state is UnitState.SHARDED and unit.storage_pointers() == []


@on_ranks(1)
def test_the_longest_unused_unit_goes_and_the_root_stays(transport: RecordingTransport) -> None:
    assert MAX_UNSHARDED_UNITS == 2
    units, ready = simple(transport, 4)
    for unit in units[:3]:
        ready.unshard(unit)
    assert states(units) == "uuuss"
    ready.unshard(units[1])  # used again: now units[2] is the longest unused
    ready.unshard(units[3])
    assert states(units) == "uusus"
    ready.unshard(units[4])
    assert states(units) == "ussuu"
    ready.unshard(units[4])
    ready.unshard(units[3])
    ready.unshard(units[2])
    assert states(units) == "usuus"
    assert transport.names("fetch") == ["(root)", "u0", "u1", "u2", "u3", "u1"]


@on_ranks(1)
def test_a_unit_in_use_stays(transport: RecordingTransport) -> None:
    units, ready = simple(transport, 5)
    with units[1].in_use(), units[2].in_use(), units[2].in_use():
        for unit in units[1:]:
            ready.unshard(unit)
        assert states(units) == "suusuu"
    ready.unshard(units[3])
    assert states(units) == "sssusu"
    with pytest.raises(ZeroDivisionError), units[3].in_use():
        raise ZeroDivisionError
    assert units[3].num_running_forwards == 0


@on_ranks(1)
def test_find_returns_the_unit_of_a_view(transport: RecordingTransport) -> None:
    arrays = [specs("t", (3, 5)), specs("f", (4,), trainable=False)]
    (unit,) = host(transport, [("u", arrays)])
    ready = UnshardedUnits(transport)
    ready.unshard(unit)
    parameter = unit.parameter("t.0")
    for tensor in (parameter, parameter.t(), parameter[1:, 2], parameter.view(torch.int64)):
        assert ready.find(tensor) == (unit, 0)
    assert ready.find(unit.parameter("f.0")) == (unit, 1)
    assert ready.find(parameter.clone()) is None
    assert ready.find(torch.empty(0)) is None
    assert ready.find(torch.eye(2).to_sparse()) is None
    # What `look` could not show again.
    assert ready.find(torch.view_as_complex(unit.parameter("f.0").view(2, 2)).conj()) is None
    ready.reshard_all()
    assert ready.find(parameter) is None


def test_on_demand_parameters_are_found_by_key_only() -> None:
    asked: list[str] = []

    def find(name: str) -> torch.Tensor:
        asked.append(name)
        return torch.full((2,), 7.0)

    module = nn.Linear(2, 2)
    module.register_parameter("absent", None)
    module.own = nn.Parameter(torch.ones(1))
    items = dict(module._parameters) | {"weight": placeholder(module.weight, torch.float32, torch.device("cpu"))}
    module.__dict__["_parameters"] = OnDemandParameters(items, find, {"weight": "a.b.weight"})
    assert torch.equal(module.weight, torch.full((2,), 7.0)) and asked == ["a.b.weight"]
    assert torch.equal(module._parameters["weight"], torch.full((2,), 7.0))
    asked.clear()
    assert module.absent is None and torch.equal(module.own, torch.ones(1))
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias", "own"]
    assert bool(dict(module.named_parameters())["weight"].isnan().all())
    assert asked == []

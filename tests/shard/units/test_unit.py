from collections.abc import Sequence

import pytest
import torch
from ranks import RecordingTransport, on_ranks

from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.comm.work import FetchWork, Work
from odc_mpi.shard.spans import SpanRecorder
from odc_mpi.shard.units.unit import Unit, UnitState
from odc_mpi.shard.units.unsharded import MAX_UNSHARDED_UNITS, UnshardedUnits


def specs(name: str, *shapes: tuple[int, ...], trainable: bool = True) -> list[ParameterSpec]:
    return [ParameterSpec(f"{name}.{i}", shape, trainable) for i, shape in enumerate(shapes)]


def allocate(transport: RecordingTransport, parts: Sequence[tuple[str, Sequence[list[ParameterSpec]]]]) -> list[Unit]:
    """Units of the given arrays; every element of every array has a value of its own, and padding is -1."""
    units: list[Unit] = []
    layouts: list[FlatLayout] = []
    for name, arrays in parts:
        of_unit = [FlatLayout.build(name or "(root)", array, transport.group.size) for array in arrays]
        units.append(Unit(name, of_unit, range(len(layouts), len(layouts) + len(of_unit))))
        layouts += of_unit
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


def simple(transport: RecordingTransport, count: int, prefetch: int = 0) -> tuple[list[Unit], UnshardedUnits]:
    """A root and some units of one array."""
    names = ["", *(f"u{i}" for i in range(count))]
    units = allocate(transport, [(name, [specs(name, (3, 5), (7,))]) for name in names])
    return units, unsharded_units(units, transport, prefetch)


def unsharded_units(units: list[Unit], transport: RecordingTransport, prefetch: int = 0) -> UnshardedUnits:
    return UnshardedUnits(units, transport, prefetch, SpanRecorder())


def states(units: Sequence[Unit]) -> str:
    return "".join(unit.state.value[0] for unit in units)


@on_ranks(1)
def test_the_longest_unused_unit_goes_and_the_root_stays(transport: RecordingTransport) -> None:
    assert MAX_UNSHARDED_UNITS == 2
    units, unsharded = simple(transport, 4)
    for unit in units[:3]:
        unsharded.unshard(unit)
    assert states(units) == "uuuss"
    unsharded.unshard(units[1])  # used again: now units[2] is the longest unused
    unsharded.unshard(units[3])
    assert states(units) == "uusus"
    unsharded.unshard(units[4])
    assert states(units) == "ussuu"
    unsharded.unshard(units[4])
    unsharded.unshard(units[3])
    unsharded.unshard(units[2])
    assert states(units) == "usuus"
    assert transport.names("fetch") == ["(root)", "u0", "u1", "u2", "u3", "u1"]


@pytest.mark.parametrize(("where", "ended"), [("start", [0]), ("wait", [0, 1, 2])])
def test_the_other_fetches_of_a_unit_end_before_an_error_is_raised(where: str, ended: list[int]) -> None:
    found: list[int] = []

    def fail(at: str, index: int) -> None:
        if (at, index) == (where, 1):
            raise ConnectionError

    def fetch(index: int) -> FetchWork:
        def arrive() -> None:
            found.append(index)
            fail("wait", index)

        fail("start", index)
        return FetchWork(torch.empty(1), Work(arrive))

    unit = Unit("u", [FlatLayout.build("u", specs("u", (1,)), 1)] * 3, range(3))
    with pytest.raises(ConnectionError):
        unit.start_fetch(fetch)
        unit.wait()
    assert (found, unit.state, unit.arrays) == (ended, UnitState.SHARDED, [])


@on_ranks(1)
def test_find_returns_the_unit_of_a_view(transport: RecordingTransport) -> None:
    arrays = [specs("t", (3, 5)), specs("f", (4,), trainable=False)]
    (unit,) = allocate(transport, [("u", arrays)])
    unsharded = unsharded_units([unit], transport)
    unsharded.unshard(unit)
    parameter = unit.parameter("t.0")
    for tensor in (parameter, parameter.t(), parameter[1:, 2], parameter.view(torch.int64)):
        assert unsharded.find(tensor) == (unit, 0)
    assert unsharded.find(unit.parameter("f.0")) == (unit, 1)
    assert unsharded.find(parameter.clone()) is None
    assert unsharded.find(torch.empty(0)) is None
    assert unsharded.find(torch.eye(2).to_sparse()) is None
    assert unsharded.find(torch.view_as_complex(unit.parameter("f.0").view(2, 2)).conj()) is None
    unsharded.reshard_all()
    assert unsharded.find(parameter) is None

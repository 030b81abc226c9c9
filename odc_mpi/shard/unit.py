"""A unit: parameters that are fetched and released together.

    SHARDED ──fetch──> FETCHING ──wait──> READY ──release──> SHARDED

SHARDED   the whole parameters are nowhere on this rank; it owns a shard of them, in the parameter window
FETCHING  a buffer is being filled from the owners' windows
READY     the buffer holds the whole parameters; tensors look into it

Parameters are immutable between two publications, so a ready unit may stay, be dropped and be fetched again at will:
`ReadyUnits` keeps the root and the most recently used few. Whoever touches a parameter gets it, fetched if need be:
modules find them through `OnDemandParameters`, autograd through `shard.autograd`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn

from odc_mpi.comm.transport import Fetch, Transport
from odc_mpi.shard.layout import FlatLayout, Slot

#: Ready units besides the root and those in use: one that computes and one that comes or goes.
MAX_READY_UNITS = 2


class UnitState(Enum):
    """See the module's docstring."""

    SHARDED = "sharded"
    FETCHING = "fetching"
    READY = "ready"


class Unit:
    """The parameters of one submodule, in one or two flat arrays: the trainable and the frozen.

    Args:
        name: Dotted name of the module; "" for the root.
        layouts: Of the flat arrays.
        indices: By which the transport knows the arrays.
    """

    def __init__(self, name: str, layouts: Sequence[FlatLayout], indices: Sequence[int]) -> None:
        self.name = name
        self.layouts = tuple(layouts)
        self.indices = tuple(indices)
        self.slots: dict[str, tuple[int, Slot]] = {
            slot.spec.name: (i, slot) for i, layout in enumerate(layouts) for slot in layout.slots
        }
        self.state = UnitState.SHARDED
        self.num_calls = 0
        self._fetches: list[Fetch] = []
        self._arrays: list[torch.Tensor] = []

    @property
    def is_root(self) -> bool:
        """Whether this is the unit of the whole module."""
        return self.name == ""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the unit from being released meanwhile. Local."""
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1

    def start_fetch(self, transport: Transport) -> None:
        """Start to fetch the whole parameters. One-sided."""
        assert self.state is UnitState.SHARDED
        self._fetches = [transport.fetch(index) for index in self.indices]
        self.state = UnitState.FETCHING

    def wait(self) -> None:
        """Complete the fetch. One-sided."""
        assert self.state is UnitState.FETCHING
        self._arrays = [fetch.wait() for fetch in self._fetches]
        self._fetches = []
        self.state = UnitState.READY

    def release(self, transport: Transport) -> None:
        """Give the whole parameters up. Local."""
        assert self.state is UnitState.READY
        arrays, self._arrays = self._arrays, []
        self.state = UnitState.SHARDED
        for array in arrays:
            transport.release(array)

    def storage_pointers(self) -> list[int]:
        """Return the addresses of the memory that a ready unit's arrays occupy. Local."""
        return [array.untyped_storage().data_ptr() for array in self._arrays]

    def look(
        self, i: int, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
    ) -> torch.Tensor:
        """Return a tensor over the memory of a ready unit's i-th array. Local.

        Not a view in autograd's sense: what is found here has no history.
        """
        storage = self._arrays[i].untyped_storage()
        return torch.empty(0, dtype=dtype, device=self._arrays[i].device).set_(storage, offset, shape, stride)

    def parameter(self, name: str) -> torch.Tensor:
        """Return a whole parameter of a ready unit, without history. Local."""
        i, slot = self.slots[name]
        array = self._arrays[i]
        shape = slot.spec.shape
        return self.look(i, array.dtype, int(array.storage_offset()) + slot.start, shape, _contiguous_stride(shape))


class ReadyUnits:
    """Fetches units when they are needed and releases those that were not used for longest.

    Args:
        transport: Hosts the shards.

    Attributes:
        generation: Counts publications: what was fetched before the last one is stale.
        readable: Whether parameters may be fetched: not between A and B, when their owners write them.
        fetch_wait_s: Seconds spent waiting for fetches since the start.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        # By use, the longest unused first.
        self._ready: dict[Unit, None] = {}
        self._by_pointer: dict[int, tuple[Unit, int]] = {}
        self.generation = 0
        self.readable = True
        self.fetch_wait_s = 0.0

    def require(self, unit: Unit) -> None:
        """Make a unit ready. One-sided."""
        if unit.state is UnitState.READY:
            if next(reversed(self._ready)) is not unit:
                del self._ready[unit]
                self._ready[unit] = None
            return
        if not self.readable:
            raise RuntimeError(
                "parameters were used between the end of a minibatch and publish(), while their owners may be writing "
                "them: evaluate or save after publish()"
            )
        self._make_room()
        start = time.perf_counter()
        unit.start_fetch(self._transport)
        unit.wait()
        self.fetch_wait_s += time.perf_counter() - start
        self._ready[unit] = None
        self._by_pointer |= {pointer: (unit, i) for i, pointer in enumerate(unit.storage_pointers())}

    def find(self, tensor: torch.Tensor) -> tuple[Unit, int] | None:
        """Return which ready unit, and which of its arrays, a tensor looks into; None if it does not. Local."""
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        return self._by_pointer.get(tensor.untyped_storage().data_ptr())

    def release_all(self) -> None:
        """Release every unit. Local."""
        for unit in list(self._ready):
            self._release(unit)

    def expire(self) -> None:
        """Release every unit because parameters are about to change. Local."""
        self.release_all()
        self.generation += 1

    def _make_room(self) -> None:
        idle = [unit for unit in self._ready if not unit.is_root and not unit.num_calls]
        for unit in idle[: max(0, len(idle) - MAX_READY_UNITS + 1)]:
            self._release(unit)

    def _release(self, unit: Unit) -> None:
        for pointer in unit.storage_pointers():
            del self._by_pointer[pointer]
        del self._ready[unit]
        unit.release(self._transport)


class OnDemandParameters(dict[str, Any]):
    """A module's `_parameters` in which looking up a sharded parameter fetches it.

    Iterating, as `module.parameters()` does, shows placeholders: right shape, dtype and device, no memory, NaN.

    Args:
        placeholders: What iterating shows, by key.
        find: Gives the parameter of a dotted name.
        names: Dotted name of every key that is sharded.
    """

    def __init__(
        self, placeholders: dict[str, nn.Parameter | None], find: Callable[[str], torch.Tensor], names: dict[str, str]
    ) -> None:
        super().__init__(placeholders)
        self._find = find
        self._names = names

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._names:
            raise RuntimeError(f"{self._names[key]} is sharded: expected changes to its slices, not a new parameter")
        super().__setitem__(key, value)

    def __getitem__(self, key: str) -> torch.Tensor | None:
        name = self._names.get(key)
        return super().__getitem__(key) if name is None else self._find(name)


def placeholder(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter that has a shape but no memory of its own; whoever computes with it gets NaN. Local."""
    device = "cpu" if parameter.device.type == "meta" else parameter.device
    nan = torch.full((), float("nan"), dtype=dtype, device=device)
    return nn.Parameter(nan.expand(parameter.shape), requires_grad=parameter.requires_grad)


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, strides = 1, []
    for extent in reversed(shape):
        strides.append(stride)
        stride *= max(1, extent)
    return tuple(reversed(strides))

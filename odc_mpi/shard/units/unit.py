"""Unit, a group of parameters that are fetched together and resharded (released) together.

    SHARDED ──fetch──> FETCHING ──wait──> UNSHARDED ──reshard──> SHARDED

SHARDED    this rank has only its shard of the parameters, in the parameter window
FETCHING   a buffer is being filled from the owners' windows, perhaps by a thread; nothing else accesses the buffer
UNSHARDED  the arrays contain the full parameters; tensors are views of these arrays

Parameters do not change between calls to `publish()`. At any time, a unit may therefore stay unsharded, be resharded
and fetched again, or be fetched ahead of its use. `shard.units.unsharded` decides this.

Note: in-place changes
    A parameter may be a view of another rank's window, so an in-place change could reach other ranks, but would not
    train the parameter. All tensors that are returned for a parameter between a fetch and a reshard are aliases of one
    tensor and share its version counter. This counter is checked after each forward pass of a unit, before a minibatch,
    and when a unit is resharded. Changes through `.data` or numpy are not detected.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from enum import Enum

import torch

from odc_mpi.comm.layout import FlatLayout, ParameterRange
from odc_mpi.comm.work import FetchWork


class UnitState(Enum):
    """State of a unit, as described in the module docstring."""

    SHARDED = "sharded"
    FETCHING = "fetching"
    UNSHARDED = "unsharded"


class Unit:
    """Parameters of one submodule that are stored in one or more flat arrays and fetched and released together.

    Attributes:
        name: Dotted name of the submodule; "" for the root.
        indices: Indices of the arrays in the transport.
        is_root: True if this is the unit of the root module.
        ranges: Index in `layouts` of each parameter's array, and the position in that array, keyed by dotted name.
        names: Dotted names of all parameters; `frozen` are those that do not require a gradient.
        arrays: Full arrays while the unit is unsharded, otherwise empty.
        num_running_forwards: Number of running forward passes. While it is not 0, the unit is not resharded.
    """

    def __init__(self, name: str, layouts: Sequence[FlatLayout], indices: Sequence[int]) -> None:
        self.name, self.is_root = name, name == ""
        self.layouts = tuple(layouts)
        self.indices = tuple(indices)
        self.ranges: dict[str, tuple[int, ParameterRange]] = {
            range_.spec.name: (i, range_) for i, layout in enumerate(layouts) for range_ in layout.ranges
        }
        self.names = tuple(self.ranges)
        self.frozen = {name for name, (_, range_) in self.ranges.items() if not range_.spec.requires_grad}
        self.state = UnitState.SHARDED
        self.num_running_forwards = 0
        self._fetches: list[FetchWork] = []
        self.arrays: list[torch.Tensor] = []
        # The tensor shared by all aliases of a parameter, and its version at the fetch.
        self._aliases: dict[str, tuple[torch.Tensor, int]] = {}

    def start_fetch(self, fetch: Callable[[int], FetchWork]) -> None:
        """Start fetching the unit's arrays by calling `fetch` with the index of each array. One-sided.

        `fetch` is `ParameterStore.fetch` or a function that fetches the array on the fetch thread.
        """
        assert self.state is UnitState.SHARDED
        with self._waits_after_error():
            for index in self.indices:
                self._fetches.append(fetch(index))
        self.state = UnitState.FETCHING

    def wait(self) -> None:
        """Wait until the fetch is complete. One-sided. If the fetch raises an exception, the unit is sharded again."""
        assert self.state is UnitState.FETCHING
        self.state = UnitState.SHARDED
        with self._waits_after_error():
            self.arrays = [self._fetches.pop(0).wait() for _ in self.indices]
        self.state = UnitState.UNSHARDED

    @contextmanager
    def _waits_after_error(self) -> Iterator[None]:
        """After an error, wait for the other fetches, which may still write to their buffers."""
        try:
            yield
        except Exception:
            while self._fetches:
                with suppress(Exception):
                    self._fetches.pop(0).wait()
            raise

    def reshard(self, release: Callable[[torch.Tensor], None], *, in_buffers: bool) -> None:
        """Pass the full arrays of an unsharded unit to `release`. `in_buffers` is True if they are in buffers."""
        assert self.state is UnitState.UNSHARDED
        arrays, self.arrays = self.arrays, []
        if in_buffers:
            self._aliases = {}  # they keep the buffer alive, whereas a view has the same address after the next fetch
        self.state = UnitState.SHARDED
        for array in arrays:
            release(array)

    def invalidate(self) -> None:
        """Make autograd reject later uses of this unit's saved parameters, because their values will change."""
        for name, (full, _) in self._aliases.items():
            torch.autograd.graph.increment_version(full)
            self._aliases[name] = full, full._version

    def drop_aliases(self) -> None:
        """Drop all references to the unit's memory. The unit must not be fetched again."""
        self._aliases = {}

    def as_strided(
        self, i: int, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
    ) -> torch.Tensor:
        """Return a tensor that shares the storage of array `i` of an unsharded unit.

        `offset` is in elements of `dtype`. To autograd, the tensor is not a view.
        """
        storage = self.arrays[i].untyped_storage()
        return torch.empty(0, dtype=dtype, device=self.arrays[i].device).set_(storage, offset, shape, stride)

    def parameter(self, name: str) -> torch.Tensor:
        """Return the full parameter `name` of an unsharded unit, detached from autograd and not copied."""
        if name not in self._aliases:
            i, range_ = self.ranges[name]
            array, shape = self.arrays[i], range_.spec.shape
            dtype = range_.spec.dtype or array.dtype
            start = (int(array.storage_offset()) + range_.start) // range_.width
            # Inference tensors have no version counter.
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
                contiguous = torch.empty(shape, device="meta").stride()
                full = self.as_strided(i, dtype, start, shape, contiguous)
            self._aliases[name] = full, full._version
        return self._aliases[name][0].detach()

    def check_unchanged(self) -> None:
        """Raise RuntimeError if a parameter of the unit has been changed in place since it was fetched."""
        for name, (full, version) in self._aliases.items():
            if full._version != version:
                raise RuntimeError(
                    f"{name} was changed in place, which trains nothing and may reach other ranks: expected changes "
                    "before shard_model, or of the slices in model.shard_parameters() before publish()"
                )

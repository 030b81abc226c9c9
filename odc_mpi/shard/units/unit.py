"""A unit: parameters that are fetched and released together.

    SHARDED ──fetch──> FETCHING ──wait──> READY ──release──> SHARDED

SHARDED   the whole parameters are nowhere on this rank; it owns a shard of them, in the parameter window
FETCHING  a buffer is being filled from the owners' windows, perhaps in a thread; nobody else touches it
READY     the buffer holds the whole parameters; tensors look into it

Parameters are immutable between two publications, so a ready unit may stay, be dropped and be fetched again at will,
also ahead of its use: `shard.units.unsharded` decides. Whoever touches a parameter gets it, fetched if need be: modules
find them through `shard.modules`, autograd through `shard.autograd`.

Note: changes in place
    What is handed out may be the memory of other ranks' windows, so a change would reach them, and train nothing.
    All tensors of one parameter that are handed out between a fetch and a release are aliases of one, with which they
    share torch's count of changes in place. It is looked at after each call of a unit, before a minibatch, and on
    release. Changes through `.data` or numpy are not counted.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum

import torch

from odc_mpi.comm.transport import Access, Transport
from odc_mpi.comm.work import FetchWork
from odc_mpi.shard.layout import FlatLayout, ParameterRange


class UnitState(Enum):
    """See the module's docstring."""

    SHARDED = "sharded"
    FETCHING = "fetching"
    UNSHARDED = "ready"


class Unit:
    """The parameters of one submodule, in flat arrays: the trainable and the frozen, those of each type apart.

    Args:
        name: Dotted name of the module; "" for the root.
        layouts: Of the flat arrays.
        indices: By which the transport knows the arrays.
    """

    def __init__(self, name: str, layouts: Sequence[FlatLayout], indices: Sequence[int]) -> None:
        self.name = name
        self.layouts = tuple(layouts)
        self.indices = tuple(indices)
        self.ranges: dict[str, tuple[int, ParameterRange]] = {
            slot.spec.name: (i, slot) for i, layout in enumerate(layouts) for slot in layout.ranges
        }
        self.state = UnitState.SHARDED
        self.num_forwards = 0
        self._fetches: list[FetchWork] = []
        self._arrays: list[torch.Tensor] = []
        # Of what aliases were handed out, with its version before.
        self._aliases: dict[str, tuple[torch.Tensor, int]] = {}

    @property
    def is_root(self) -> bool:
        """Whether this is the unit of the whole module."""
        return self.name == ""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the unit from being released meanwhile."""
        self.num_forwards += 1
        try:
            yield
        finally:
            self.num_forwards -= 1

    def start_fetch(self, fetch: Callable[[int], FetchWork]) -> None:
        """Start to fetch the whole parameters. One-sided.

        Args:
            fetch: Starts to fetch one array: a parameter store's `fetch`, or one that runs beside the computation.
        """
        assert self.state is UnitState.SHARDED
        self._fetches = [fetch(index) for index in self.indices]
        self.state = UnitState.FETCHING

    def wait(self) -> None:
        """Complete the fetch; if it fails, the unit is sharded again. One-sided."""
        assert self.state is UnitState.FETCHING
        fetches, self._fetches = self._fetches, []
        self.state = UnitState.SHARDED
        self._arrays = [fetch.wait() for fetch in fetches]
        self.state = UnitState.UNSHARDED

    def reshard(self, transport: Transport) -> None:
        """Give the whole parameters up."""
        assert self.state is UnitState.UNSHARDED
        arrays, self._arrays = self._arrays, []
        if transport.parameters.access is Access.COPY:
            self._aliases = {}  # they keep the buffer; what is a view is in the same place the next time
        self.state = UnitState.SHARDED
        for array in arrays:
            transport.parameters.release(array)

    def drop_aliases(self) -> None:
        """Let go of all memory of a unit that will not be fetched again."""
        self._aliases = {}

    def buffer_bytes(self) -> int:
        """Return the bytes of the memory that a ready unit's arrays occupy."""
        return sum(array.untyped_storage().nbytes() for array in self._arrays)

    def storage_pointers(self) -> list[int]:
        """Return the addresses of the memory that a ready unit's arrays occupy."""
        return [array.untyped_storage().data_ptr() for array in self._arrays]

    def as_strided(
        self, i: int, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
    ) -> torch.Tensor:
        """Return a tensor over the memory of a ready unit's i-th array.

        Not a view in autograd's sense: what is found here has no history.
        """
        storage = self._arrays[i].untyped_storage()
        return torch.empty(0, dtype=dtype, device=self._arrays[i].device).set_(storage, offset, shape, stride)

    def parameter(self, name: str) -> torch.Tensor:
        """Return a whole parameter of a ready unit, without history."""
        if name not in self._aliases:
            i, slot = self.ranges[name]
            array, shape = self._arrays[i], slot.spec.shape
            start = int(array.storage_offset()) + slot.start
            # Of inference tensors nobody counts the changes.
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
                contiguous = torch.empty(shape, device="meta").stride()
                whole = self.as_strided(i, array.dtype, start, shape, contiguous)
            self._aliases[name] = whole, whole._version
        return self._aliases[name][0].detach()

    def check_unchanged(self) -> None:
        """Refuse that a parameter was changed in place since the unit became ready."""
        for name, (whole, version) in self._aliases.items():
            if whole._version != version:
                raise RuntimeError(
                    f"{name} was changed in place, which trains nothing and may reach other ranks: expected changes "
                    "before shard_model, or of the slices in model.shard_parameters() before publish()"
                )

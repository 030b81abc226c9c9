"""The ways to move a unit that `odc-mpi bench transport` compares, over memory that is allocated once per size.

There are several units of a size, which take turns as a model's do: one alone would stay in a core's own cache, which
no model's units do. A row of pushes ends with ordering point A (`finish`) and the next begins with B (`proceed`), as in
training. All values are small whole numbers, so that every sum can be checked exactly.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from odc_mpi.bench.baselines.gloo import Gloo
from odc_mpi.comm.collective import CollectiveCommunicator
from odc_mpi.comm.factory import GradientStoreFactory, gradient_store_factories, window_transport
from odc_mpi.comm.reduce.accumulate import WindowGradientStore
from odc_mpi.comm.transport import Access, Transport
from odc_mpi.errors import UserError
from odc_mpi.runtime.memory import available_bytes
from odc_mpi.runtime.world import World
from odc_mpi.shard.layout import FlatLayout, ParameterSpec

#: How gradients reach their owners, by the name that `comm.reduction` has for it.
REDUCTIONS = gradient_store_factories()

#: There are so many units that they hold at least so much, more than the cache of a core ...
UNITS_BYTES = 16 << 20
#: ... but at most so many: each has a window per transport.
MAX_UNITS = 64


@dataclass(frozen=True)
class Variant:
    """One way to move a unit.

    Attributes:
        operations: One for each unit: moves it once.
        is_right: Whether each unit arrives as it should, and did so far. Collective.
        gloo: The variant of gloo's to compare with.
        moves: Whether bytes move at all.
        one_sided: Whether a lone rank can do it.
        complete: Makes a lone rank's operation complete at its targets. One-sided.
        finish: Ends a row of operations, within the time. Collective.
        proceed: Makes ready for the next row, outside of the time. Collective.
    """

    operations: Sequence[Callable[[], object]]
    is_right: Callable[[], bool]
    gloo: str | None = None
    moves: bool = True
    one_sided: bool = False
    complete: Callable[[], object] = lambda: None
    finish: Callable[[], object] = lambda: None
    proceed: Callable[[], object] = lambda: None


def check(world: World, variants: Mapping[str, Variant]) -> None:
    """Look whether everything arrives as it should, and did so far. Collective.

    Raises:
        RuntimeError: Something was moved wrongly; on every rank.
    """
    for name, variant in variants.items():
        right = world.gather_objects(variant.is_right())
        if not all(right):
            raise RuntimeError(f"{name} moved something wrongly, seen by rank {right.index(False)}")


def fetches(transport: Transport, layout: FlatLayout, num_units: int, **attributes: Any) -> Variant:
    """Return the fetches through a transport whose units hold what `is_whole` looks for."""

    def fetch(i: int) -> None:
        transport.parameters.release(transport.parameters.fetch(i).wait())

    def arrives(i: int) -> bool:
        fetched = transport.parameters.fetch(i).wait()
        right = is_whole(fetched, layout)
        transport.parameters.release(fetched)
        return right

    units = range(num_units)
    return Variant([partial(fetch, i) for i in units], lambda: all(map(arrives, units)), **attributes)


def is_whole(array: torch.Tensor, layout: FlatLayout) -> bool:
    """Whether every owner's part is there: each wrote its rank, counted from 1."""
    owned = ((owner, *layout.owned(owner)) for owner in range(layout.num_owners))
    return all(bool((array[start:stop] == owner + 1).all()) for owner, start, stop in owned)


def unit_layout(numel: int, num_owners: int, *, trainable: bool = True) -> FlatLayout:
    """Return the layout of a unit of one parameter."""
    return FlatLayout.build("unit", [ParameterSpec("weight", (numel,), trainable)], num_owners)


def pushes(
    transport: Transport, num_units: int, push: Callable[[int], object], numel: int, **attributes: Any
) -> Variant:
    """Return the pushes of gradients of ones through a transport.

    Args:
        transport: Has the units.
        num_units: How many there are.
        push: Pushes a gradient of the unit with this index.
        numel: Elements of each unit that this rank owns.
        attributes: Further attributes of the variant.
    """
    num_pushes = np.zeros(num_units)

    def counted(i: int) -> None:
        num_pushes[i] += 1
        push(i)

    def is_right() -> bool:
        # A tells how often all ranks have pushed, too.
        totals = transport.complete_gradients(num_pushes).sum(axis=0)
        right = all(bool((transport.gradients.shard(i)[:numel] == totals[i]).all()) for i in range(num_units))
        transport.publish_parameters()
        return right

    return Variant(
        [partial(counted, i) for i in range(num_units)],
        is_right,
        finish=lambda: transport.complete_gradients(np.zeros(1)),
        proceed=transport.publish_parameters,
        **attributes,
    )


class Units:
    """Units of one size, in all the memory that the variants need. Making and freeing them is collective.

    Args:
        world: The ranks.
        num_bytes: Of each whole unit, a multiple of 4.
        collectives: MPI's.
        gloo: None where it is left out.

    Attributes:
        variants: By name.
        num_units: How many there are.
        crossing_bytes: Of a unit, what this rank does not own itself.

    Raises:
        UserError: Too little memory, on every rank.
    """

    def __init__(self, world: World, num_bytes: int, collectives: CollectiveCommunicator, gloo: Gloo | None) -> None:
        self.num_units = max(1, min(MAX_UNITS, UNITS_BYTES // num_bytes))
        self._world, self._layout = world, unit_layout(num_bytes // 4, world.size)
        self._units = range(self.num_units)
        # Each rank: all units, its shards of them, and three more units: two to land in, one for a library's own.
        # All ranks together: the parameters of each transport and the gradients, twice for a mailbox's slots.
        unit = 4 * world.size * self._layout.shard_numel
        local_bytes, shared_bytes = (2 * self.num_units + 3) * unit, (2 + 3 * len(REDUCTIONS)) * self.num_units * unit
        require_host_memory(world, world.local_size * local_bytes + shared_bytes)
        first, last = self._layout.owned(world.rank)
        self._owned = last - first
        self.crossing_bytes = num_bytes - 4 * self._owned
        # All written here, so touched. Units are padded to equal shards, as the collectives want them.
        shard_numel = self._layout.shard_numel
        self._ones = torch.ones(self.num_units, world.size * shard_numel)
        self._local_shards = torch.full((self.num_units, shard_numel), world.rank + 1.0)
        self._whole = torch.zeros(world.size * shard_numel)
        self._sums = torch.zeros(shard_numel)
        self._transports: list[Transport] = []
        self.variants = {"memcpy": self._memcpy()}
        self.variants["fetch_zero_copy"] = self._fetch(zero_copy=True)
        self.variants["fetch_copy"] = self._fetch(zero_copy=False)
        self.variants["mpi_allgather"] = self._gather(collectives.all_gather)
        if gloo is not None:
            self.variants["gloo_all_gather"] = self._gather(gloo.all_gather)
        for name, reduction in REDUCTIONS.items():
            self.variants[f"push_{name}"] = self._push(reduction)
        self.variants["mpi_reduce_scatter"] = self._reduce(collectives.reduce_scatter)
        if gloo is not None:
            self.variants["gloo_reduce_scatter"] = self._reduce(gloo.reduce_scatter)

    def free(self) -> None:
        """Free all memory. Collective."""
        self.variants.clear()
        for transport in reversed(self._transports):
            transport.close()
        self._ones = self._local_shards = self._whole = self._sums = torch.empty(0)

    def _memcpy(self) -> Variant:
        numel = self._layout.numel
        sources, target = self._ones[:, :numel].numpy(), self._whole[:numel].numpy()

        def is_right() -> bool:
            target[:] = 0
            np.copyto(target, sources[0])
            return bool((target == 1).all())

        return Variant([partial(np.copyto, target, source) for source in sources], is_right)

    def _fetch(self, *, zero_copy: bool) -> Variant:
        transport = window_transport(self._world, zero_copy=zero_copy)
        self._allocate(transport, trainable=False)
        for i in self._units:
            transport.parameters.shard(i).copy_(self._local_shards[i])
        transport.publish_parameters()
        attributes = {"gloo": "gloo_all_gather", "moves": transport.parameters.access is Access.COPY, "one_sided": True}
        return fetches(transport, self._layout, self.num_units, **attributes)

    def _gather(self, all_gather: Callable[[torch.Tensor, torch.Tensor], None]) -> Variant:
        def is_right() -> bool:
            self._whole.zero_()
            all_gather(self._local_shards[0], self._whole)
            return is_whole(self._whole, self._layout)

        return Variant(
            [partial(all_gather, shard, self._whole) for shard in self._local_shards], is_right, gloo="gloo_all_gather"
        )

    def _push(self, reduction: GradientStoreFactory) -> Variant:
        transport = window_transport(self._world, reduction=reduction)
        gradients = transport.gradients
        assert isinstance(gradients, WindowGradientStore)
        self._allocate(transport, trainable=True)
        ones = self._ones[:, : self._layout.numel]
        return pushes(
            transport,
            self.num_units,
            lambda i: gradients.push(i, ones[i]).wait(),
            self._owned,
            gloo="gloo_reduce_scatter",
            one_sided=True,
            complete=gradients.flush,
        )

    def _reduce(self, reduce_scatter: Callable[[torch.Tensor, torch.Tensor], None]) -> Variant:
        def is_right() -> bool:
            self._sums.zero_()
            reduce_scatter(self._ones[0], self._sums)
            return bool((self._sums == self._world.size).all())

        return Variant(
            [partial(reduce_scatter, gradient, self._sums) for gradient in self._ones],
            is_right,
            gloo="gloo_reduce_scatter",
        )

    def _allocate(self, transport: Transport, *, trainable: bool) -> None:
        self._transports.append(transport)
        transport.allocate([unit_layout(self._layout.numel, self._world.size, trainable=trainable)] * self.num_units)


def require_host_memory(world: World, required: int, option: str = "--sizes") -> None:
    """Check that this node has so many bytes left for all of its ranks together. Collective.

    Args:
        world: The ranks.
        required: Bytes for those of this node.
        option: What a person makes smaller, for the message.

    Raises:
        UserError: It has not; raised on every rank.
    """

    def check_available() -> None:
        free = available_bytes()
        if required > free:
            raise UserError(
                f"{free >> 20} MiB of memory are available, expected at least {required >> 20} MiB for "
                f"{world.local_size} ranks on this node: choose smaller {option} or fewer --ranks"
            )

    world.run_on_all(check_available)

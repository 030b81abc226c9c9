"""Variants of `odc-mpi bench transport`: ways to move a unit between ranks. Memory is allocated once per size.

For each size there are several units, which are moved one after another like the units of a model. A single unit would
stay in the cache of a core. As in training, gradients are completed after a sequence of pushes (`finish`), and
parameters are published before the next sequence (`proceed`). All values are small integers, so every sum is exact.
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
from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.comm.reduce.accumulate import WindowGradientStore
from odc_mpi.comm.transport import Access, Transport
from odc_mpi.errors import UserError
from odc_mpi.runtime.memory import available_bytes
from odc_mpi.runtime.world import World

#: Factories of gradient stores, by value of `comm.reduction`.
REDUCTIONS = gradient_store_factories()

#: Total bytes of all units of one size, more than the cache of a core ...
UNITS_BYTES = 16 << 20
#: ... but at most this number of units, since each unit has a window per transport.
MAX_UNITS = 64


@dataclass(frozen=True)
class Variant:
    """One way to move a unit.

    Attributes:
        operations: One function per unit. A call moves the unit once.
        is_right: Function that returns True if all units, moved now or earlier, have arrived correctly. Collective.
        gloo: Name of the gloo variant to compare with, or None.
        moves: True if an operation copies bytes.
        finish: Function that ends a sequence of operations. Its time is part of the sample. Collective.
        proceed: Function that prepares the next sequence. Its time is not part of the sample. Collective.
    """

    operations: Sequence[Callable[[], object]]
    is_right: Callable[[], bool]
    gloo: str | None = None
    moves: bool = True
    finish: Callable[[], object] = lambda: None
    proceed: Callable[[], object] = lambda: None


def check(world: World, variants: Mapping[str, Variant]) -> None:
    """Raise RuntimeError on every rank if a variant moves wrong data, or has moved any before. Collective."""
    for name, variant in variants.items():
        right = world.gather_objects(variant.is_right())
        if not all(right):
            raise RuntimeError(f"{name} moved wrong data, found on rank {right.index(False)}")


def fetches(transport: Transport, layout: FlatLayout, num_units: int, **attributes: Any) -> Variant:
    """Return a variant that fetches units through a transport, and checks them with `is_whole`."""

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
    """Return True if, in a fetched unit, all elements that a rank owns equal that rank plus 1."""
    owned = ((owner, *layout.owned(owner)) for owner in range(layout.num_owners))
    return all(bool((array[start:stop] == owner + 1).all()) for owner, start, stop in owned)


def unit_layout(numel: int, num_owners: int, *, trainable: bool = True) -> FlatLayout:
    """Return the layout of a unit that consists of one parameter with `numel` elements."""
    return FlatLayout.build("unit", [ParameterSpec("weight", (numel,), trainable)], num_owners)


def pushes(
    transport: Transport, num_units: int, push: Callable[[int], object], numel: int, **attributes: Any
) -> Variant:
    """Return a variant that pushes gradients through a transport with `num_units` allocated units.

    `push` pushes a gradient of ones for the unit with the given index. This rank owns `numel` elements of each unit.
    """
    num_pushes = np.zeros(num_units)

    def counted(i: int) -> None:
        num_pushes[i] += 1
        push(i)

    def is_right() -> bool:
        # Reports of all ranks' push counts travel with the synchronization.
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
    """Units of one size, and all variants that move them. Construction allocates the memory, and is collective.

    It raises `AllRanksUserError` if a node has too little memory available. `num_bytes` of a unit, a multiple of 4, are
    moved; other ranks own `crossing_bytes` of them. Without `gloo`, its variants are omitted.
    """

    def __init__(self, world: World, num_bytes: int, collectives: CollectiveCommunicator, gloo: Gloo | None) -> None:
        self.num_units = max(1, min(MAX_UNITS, UNITS_BYTES // num_bytes))
        self._world, self._layout = world, unit_layout(num_bytes // 4, world.size)
        self._units = range(self.num_units)
        # Per rank: gradients and shards of all units, and three more units: two target buffers, one inside a library.
        # All ranks together: parameters of each transport, and gradients, twice for the slots of a mailbox.
        unit = 4 * world.size * self._layout.shard_numel
        local_bytes, shared_bytes = (2 * self.num_units + 3) * unit, (2 + 3 * len(REDUCTIONS)) * self.num_units * unit
        require_host_memory(world, world.local_size * local_bytes + shared_bytes)
        first, last = self._layout.owned(world.rank)
        self._owned = last - first
        self.crossing_bytes = num_bytes - 4 * self._owned
        # Written here, so that no page is touched first in a measurement. Collectives need equal, so padded, shards.
        shard_numel = self._layout.shard_numel
        self._ones = torch.ones(self.num_units, world.size * shard_numel)
        self._local_shards = torch.full((self.num_units, shard_numel), world.rank + 1.0)
        self._full = torch.zeros(world.size * shard_numel)
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
        """Free the memory of all units and variants. Collective."""
        self.variants.clear()
        for transport in reversed(self._transports):
            transport.close()
        self._ones = self._local_shards = self._full = self._sums = torch.empty(0)

    def _memcpy(self) -> Variant:
        numel = self._layout.numel
        sources, target = self._ones[:, :numel].numpy(), self._full[:numel].numpy()

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
        moves = transport.parameters.access is Access.COPY
        return fetches(transport, self._layout, self.num_units, gloo="gloo_all_gather", moves=moves)

    def _gather(self, all_gather: Callable[[torch.Tensor, torch.Tensor], None]) -> Variant:
        def is_right() -> bool:
            self._full.zero_()
            all_gather(self._local_shards[0], self._full)
            return is_whole(self._full, self._layout)

        return Variant(
            [partial(all_gather, shard, self._full) for shard in self._local_shards], is_right, gloo="gloo_all_gather"
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
    """Raise `AllRanksUserError`, with `option`, if a node has too little free memory for its ranks. Collective."""

    def check_available() -> None:
        free = available_bytes()
        if required > free:
            raise UserError(
                f"{free >> 20} MiB of memory are available, expected at least {required >> 20} MiB for "
                f"{world.local_size} ranks on this node: choose smaller {option} or fewer --ranks"
            )

    world.run_on_all(check_available)

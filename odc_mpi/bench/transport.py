"""Benchmark of the speed of fetches and pushes, compared with memcpy, MPI collectives and gloo.

Sizes of units are measured one after another. For each size, memory is allocated once, touched and checked first.
Several units of the size are moved one after another, like the units of a model, so that none stays in the cache of a
core. As in training, gradients are completed after a sequence of pushes (`finish`), and parameters are published before
the next sequence (`proceed`). All values are small integers, so every sum is exact.

All ranks run the same variant at the same time; the variants alternate, round after round. A sample is a sequence of
operations that all ranks begin together; the time of the slowest rank counts. `odc-mpi doctor` measures what a single
rank can do while the others compute.

Variants, all with units in fp32:

    memcpy                   copy of the unit in private memory, by one core per rank
    fetch_zero_copy          a view of the unit if all ranks are on one node: no bytes move
    fetch_copy               a copy of the unit in a buffer: this rank's shard is copied, the others are fetched
    push_NAME                the unit's gradient, added to the shards of its owners with `comm.reduction` NAME; a sample
                             includes the synchronization after which all gradients are complete
    mpi_allgather, gloo_all_gather            the unit from all shards, as FSDP fetches
    mpi_reduce_scatter, gloo_reduce_scatter   the unit's gradient into a shard of sums, as FSDP reduces

GB/s are 10^9 bytes of the *full unit* per second that a rank waits. A rank's own shard, 1/`ranks` of the unit, stays in
its process; `crossing_bytes` is the rest.

benchmarks/README.md describes the JSON object that `measure` returns.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from odc_mpi.bench.baselines.gloo import Gloo
from odc_mpi.bench.measure import entries, header, interleaved, seconds, slowest
from odc_mpi.comm.collective import CollectiveCommunicator
from odc_mpi.comm.factory import GradientStoreFactory, gradient_store_factories, window_transport
from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.comm.reduce.accumulate import WindowGradientStore
from odc_mpi.comm.transport import Access, Transport
from odc_mpi.errors import UserError
from odc_mpi.formatting import format_size
from odc_mpi.runtime.memory import available_bytes
from odc_mpi.runtime.world import World

#: Factories of gradient stores, by value of `comm.reduction`.
REDUCTIONS = gradient_store_factories()

#: Total bytes of all units of one size, more than the cache of a core ...
UNITS_BYTES = 16 << 20
#: ... but at most this number of units, since each unit has a window per transport.
MAX_UNITS = 64
#: Minimum bytes that a sample moves, so that its synchronizations, of up to 0.4 ms, are negligible ...
SAMPLE_BYTES = 64 << 20
#: ... but at most this number of operations. Variants that move no bytes run this number.
MAX_OPERATIONS = 256


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


def measure(
    world: World, sizes: list[int], repeats: int, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure all variants for units of several sizes in bytes, multiples of 4. Collective.

    The JSON object, which is the same on every rank, is described in benchmarks/README.md.

    Raises:
        UserError: A node has too little memory for a size.
        RuntimeError: Fetched parameters or sums of gradients are wrong.
    """
    load = os.getloadavg()[0]
    cores = world.cores_per_rank()
    torch.set_num_threads(1)  # copies of memcpy and of fetches use one core per rank
    collectives = CollectiveCommunicator(world)
    one_node = world.num_nodes == 1
    gloo = Gloo(world) if one_node else None
    results = []
    for num_bytes in sizes:
        report(f"units of {format_size(num_bytes)}")
        results.append(_measure_size(world, num_bytes, repeats, collectives, gloo))
    if gloo is not None:
        gloo.close()
    collectives.free()
    gloo_variants = () if one_node else ("gloo_all_gather", "gloo_reduce_scatter")
    return {
        **header(world, "transport", load, cores_per_rank=cores, repeats=repeats, dtype="float32"),
        "left_out": dict.fromkeys(gloo_variants, "for ranks of one node only"),
        "sizes": results,
    }


def _measure_size(
    world: World, num_bytes: int, repeats: int, collectives: CollectiveCommunicator, gloo: Gloo | None
) -> dict[str, Any]:
    units = Units(world, num_bytes, collectives, gloo)
    check(world, units.variants)
    samples = {name: partial(_sample, collectives, variant, num_bytes) for name, variant in units.variants.items()}
    interleaved(samples, 1)  # touches the memory that the check did not use
    times = slowest(world, interleaved(samples, repeats))
    check(world, units.variants)
    result = {
        "size_bytes": num_bytes,
        "num_units": units.num_units,
        "crossing_bytes": units.crossing_bytes,
        "all_at_once": _entries(units.variants, num_bytes, times),
    }
    units.free()
    return result


def _sample(collectives: CollectiveCommunicator, variant: Variant, num_bytes: int) -> float:
    times = max(1, min(MAX_OPERATIONS, SAMPLE_BYTES // num_bytes)) if variant.moves else MAX_OPERATIONS
    collectives.barrier()
    seconds_per_operation = seconds(variant.operations, times, variant.finish)
    variant.proceed()
    return seconds_per_operation


def _entries(variants: Mapping[str, Variant], num_bytes: int, times: Mapping[str, list[float]]) -> dict[str, Any]:
    measured = entries(times, num_bytes, of_memcpy=lambda _: "memcpy", of_gloo=lambda name: variants[name].gloo)
    no_speed = {"gb_per_s": None, "of_memcpy": None, "of_gloo": None}
    return {name: entry if variants[name].moves else entry | no_speed for name, entry in measured.items()}


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

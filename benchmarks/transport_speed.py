"""Compare the speed of fetches and pushes with that of memcpy and MPI collectives.

    mpiexec -n 2 python benchmarks/transport_speed.py [--sizes 64K,1M,256M] [--repeats 7] [--json]

Unit sizes are measured sequentially. A measurement cycles through several units, as training does, so that none
stays in the cache of a core. As in training, gradients are completed after a sequence of pushes (`finish`), and
parameters are published before the next sequence (`proceed`). All values are small integers, so every sum is exact, and
the results of all variants are checked.

A sample is a sequence of operations of one variant. All ranks begin it at the same time, and its time is that of the
slowest rank. The variants take turns in rounds.

Variants, all with units in fp32:

    memcpy                   copies the unit within private memory, with one core per rank
    fetch_zero_copy          creates a view of the unit if all ranks are on one node, and a copy otherwise
    fetch_copy               copies this rank's shard to a buffer, and fetches the other shards into the same buffer
    push_NAME                adds the unit's gradient to the shards of its owners, with `comm.reduction` set to NAME;
                             a sample includes the synchronization that completes all gradients
    mpi_allgather            gathers all shards of the unit, as FSDP does
    mpi_reduce_scatter       sums the unit's gradients and keeps this rank's shard, as FSDP does

Speeds are in GB/s, where 1 GB is 10^9 bytes of the *full unit*. A rank's own shard does not leave its process, however:
`crossing_bytes` is the size of the other shards.

The JSON object has in `sizes`, for each size of a unit, `size_bytes`, `num_units`, `crossing_bytes` and `all_at_once`:
by variant `seconds` and `gb_per_s` as quartiles over rounds, and `of_memcpy`, the speed relative to memcpy. It also has
`cores_per_rank`, `repeats`, `dtype` and the keys of `measure.header`; `load_average`, before and after, shows if other
processes were computing.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from collectives import CollectiveCommunicator
from measure import DEFAULT_SIZES, Measure, entries, header, interleaved, parse_sizes, run_program, seconds, slowest

from odc_mpi.cli.options import Parser, positive_int
from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.comm.reduce.accumulate import WindowGradientStore
from odc_mpi.comm.settings import CommConfig, Reduction
from odc_mpi.comm.transport import Transport
from odc_mpi.errors import UserError
from odc_mpi.formatting import format_size
from odc_mpi.runtime.memory import available_bytes
from odc_mpi.runtime.world import World

#: Values of `comm.reduction`, except "auto".
REDUCTIONS: tuple[Reduction, ...] = ("accumulate", "mailbox")

#: Total bytes in the units of one size, more than fit in the cache of a core ...
UNITS_BYTES = 16 << 20
#: ... but at most this number of units, because each unit has a window per transport.
MAX_UNITS = 64
#: Number of bytes that a sample moves, enough to make its synchronization of up to 0.4 ms negligible ...
SAMPLE_BYTES = 64 << 20
#: ... but at most this number of operations, which is also the number if a variant moves no bytes.
MAX_OPERATIONS = 256


def main() -> int:
    """Measure, let rank 0 print the result, and return the exit code. Collective."""
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    help_text = "unit sizes in bytes, such as 64K,1M,256M; default: 64K to 256M"
    parser.add_argument("--sizes", default=DEFAULT_SIZES, metavar="LIST", help=help_text)
    parser.add_argument("--repeats", type=positive_int, default=7, metavar="N", help="rounds; default: 7")

    def prepare(arguments: argparse.Namespace) -> Measure:
        sizes = parse_sizes(arguments.sizes)
        return lambda world, report: measure(world, sizes, arguments.repeats, report)

    return run_program(parser, prepare)


@dataclass(frozen=True)
class Variant:
    """Method of moving the data of a unit.

    Attributes:
        operations: One function per unit, which moves the unit once per call.
        is_right: Function that verifies the moved data and returns True if it is correct. Collective.
        moves: True if an operation copies data, False if it creates a view.
        finish: Function that ends a sequence of operations. Its time is part of the sample. Collective.
        proceed: Function that prepares the next sequence. Its time is not part of the sample. Collective.
    """

    operations: Sequence[Callable[[], object]]
    is_right: Callable[[], bool]
    moves: bool = True
    finish: Callable[[], object] = lambda: None
    proceed: Callable[[], object] = lambda: None


def measure(
    world: World, sizes: list[int], repeats: int, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure all variants for each unit size in `sizes` (bytes, multiples of 4). Returns a JSON object. Collective.

    Raises:
        AllRanksUserError: A node does not have enough memory available for one of the sizes.
        RuntimeError: Fetched parameters or sums of gradients are wrong.
    """
    load = os.getloadavg()[0]
    cores = world.cores_per_rank()
    torch.set_num_threads(1)  # copies of memcpy and of fetches use one core per rank
    collectives = CollectiveCommunicator(world)
    results = []
    for num_bytes in sizes:
        report(f"units of {format_size(num_bytes)}")
        results.append(_measure_size(world, num_bytes, repeats, collectives))
    collectives.free()
    return {
        **header(world, "transport", load, cores_per_rank=cores, repeats=repeats, dtype="float32"),
        "sizes": results,
    }


def _measure_size(world: World, num_bytes: int, repeats: int, collectives: CollectiveCommunicator) -> dict[str, Any]:
    units = Units(world, num_bytes, collectives)
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
    measured = entries(times, num_bytes, of_memcpy=lambda _: "memcpy")
    no_speed = {"gb_per_s": None, "of_memcpy": None}
    return {name: entry if variants[name].moves else entry | no_speed for name, entry in measured.items()}


def check(world: World, variants: Mapping[str, Variant]) -> None:
    """Raise `RuntimeError` on every rank if a variant moved wrong data on any rank. Collective."""
    for name, variant in variants.items():
        right = world.gather_objects(variant.is_right())
        if not all(right):
            raise RuntimeError(f"{name} moved wrong data, found on rank {right.index(False)}")


def variant_with_check(
    operations: Sequence[Callable[[], object]], target: torch.Tensor, is_right: Callable[[], bool]
) -> Variant:
    """Return a variant with `operations` that write to `target`, whose content `is_right` verifies."""

    def writes_right() -> bool:
        target.zero_()
        operations[0]()
        return is_right()

    return Variant(operations, writes_right)


def fetches(transport: Transport, layout: FlatLayout, num_units: int, **attributes: Any) -> Variant:
    """Return a variant that fetches units whose content `is_whole` verifies. `attributes` are other fields."""

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
    """Return True if each element of the fetched unit `array` equals the rank of its owner plus 1."""
    owned = ((owner, *layout.owned(owner)) for owner in range(layout.num_owners))
    return all(bool((array[start:stop] == owner + 1).all()) for owner, start, stop in owned)


def unit_layout(numel: int, num_owners: int, *, trainable: bool = True) -> FlatLayout:
    """Return the layout of a unit that consists of one `[numel]` parameter, sharded over `num_owners` ranks."""
    return FlatLayout.build("unit", [ParameterSpec("weight", (numel,), trainable)], num_owners)


def pushes(transport: Transport, num_units: int, push: Callable[[int], object], numel: int) -> Variant:
    """Return a variant that calls `push(i)` to push ones to unit `i`. This rank owns `numel` elements of each unit."""
    num_pushes = np.zeros(num_units)

    def counted(i: int) -> None:
        num_pushes[i] += 1
        push(i)

    def is_right() -> bool:
        # The synchronization also gathers the push counts of all ranks.
        totals = transport.complete_gradients(num_pushes).sum(axis=0)
        right = all(bool((transport.gradients.shard(i)[:numel] == totals[i]).all()) for i in range(num_units))
        transport.publish_parameters()
        return right

    return Variant(
        [partial(counted, i) for i in range(num_units)],
        is_right,
        finish=lambda: transport.complete_gradients(np.zeros(1)),
        proceed=transport.publish_parameters,
    )


class Units:
    """Buffers of units of `num_bytes` bytes, and all benchmarked ways to move them. Construction is collective.

    `crossing_bytes` is the number of bytes of each unit that other ranks own. Raises `AllRanksUserError` if a
    node has too little memory available.
    """

    def __init__(self, world: World, num_bytes: int, collectives: CollectiveCommunicator) -> None:
        self.num_units = max(1, min(MAX_UNITS, UNITS_BYTES // num_bytes))
        self._world, self._layout = world, unit_layout(num_bytes // 4, world.size)
        self._units = range(self.num_units)
        # Each rank: gradients and shards of all units, and three more units: two target buffers, and one in a library.
        # All ranks together: parameters of each transport, and gradients, twice for the slots of a mailbox.
        unit = 4 * world.size * self._layout.shard_numel
        local_bytes, shared_bytes = (2 * self.num_units + 3) * unit, (2 + 3 * len(REDUCTIONS)) * self.num_units * unit
        require_host_memory(world, world.local_size * local_bytes + shared_bytes)
        first, last = self._layout.owned(world.rank)
        self._owned = last - first
        self.crossing_bytes = num_bytes - 4 * self._owned
        # Initialized here, so that no measurement touches a page first. Collectives need shards of equal, padded size.
        shard_numel = self._layout.shard_numel
        self._ones = torch.ones(self.num_units, world.size * shard_numel)
        self._local_shards = torch.full((self.num_units, shard_numel), world.rank + 1.0)
        full, sums = torch.zeros(world.size * shard_numel), torch.zeros(shard_numel)
        self._transports: list[Transport] = []
        copy = full[: self._layout.numel]
        copies = [partial(np.copyto, copy.numpy(), source) for source in self._ones[:, : len(copy)].numpy()]
        gathers = [partial(collectives.all_gather, shard, full) for shard in self._local_shards]
        reductions = [partial(collectives.reduce_scatter, gradient, sums) for gradient in self._ones]
        self.variants = {
            "memcpy": variant_with_check(copies, copy, lambda: bool((copy == 1).all())),
            "fetch_zero_copy": self._fetch(zero_copy=True),
            "fetch_copy": self._fetch(zero_copy=False),
            "mpi_allgather": variant_with_check(gathers, full, lambda: is_whole(full, self._layout)),
            **{f"push_{reduction}": self._push(reduction) for reduction in REDUCTIONS},
            "mpi_reduce_scatter": variant_with_check(reductions, sums, lambda: bool((sums == world.size).all())),
        }

    def free(self) -> None:
        """Free the memory of all units and variants. Collective."""
        self.variants.clear()
        for transport in reversed(self._transports):
            transport.close()

    def _fetch(self, *, zero_copy: bool) -> Variant:
        transport = window_transport(self._world, comm=CommConfig(zero_copy="auto" if zero_copy else "off"))
        self._allocate(transport, trainable=False)
        for i in self._units:
            transport.parameters.shard(i).copy_(self._local_shards[i])
        transport.publish_parameters()
        moves = transport.parameters.uses_buffer(0)
        return fetches(transport, self._layout, self.num_units, moves=moves)

    def _push(self, reduction: Reduction) -> Variant:
        transport = window_transport(self._world, comm=CommConfig(reduction=reduction))
        gradients = transport.gradients
        assert isinstance(gradients, WindowGradientStore)
        self._allocate(transport, trainable=True)
        ones = self._ones[:, : self._layout.numel]

        def push(i: int) -> None:
            gradients.push(i, ones[i]).wait()

        return pushes(transport, self.num_units, push, self._owned)

    def _allocate(self, transport: Transport, *, trainable: bool) -> None:
        self._transports.append(transport)
        transport.allocate([unit_layout(self._layout.numel, self._world.size, trainable=trainable)] * self.num_units)


def require_host_memory(world: World, required: int, option: str = "--sizes") -> None:
    """Raise `AllRanksUserError`, which names `option`, if a node has fewer than `required` bytes free. Collective."""

    def check_available() -> None:
        free = available_bytes()
        if required > free:
            raise UserError(
                f"{free >> 20} MiB of memory are available, expected at least {required >> 20} MiB for "
                f"{world.local_size} ranks on this node: choose smaller {option} or fewer ranks"
            )

    world.run_on_all(check_available)


if __name__ == "__main__":
    sys.exit(main())

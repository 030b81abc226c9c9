"""The ways to move a unit that `odc-mpi bench transport` compares, each over memory that is allocated once per size.

A row of pushes ends with ordering point A (`finish`) and the next begins with B (`proceed`), as in training. All
values are small whole numbers, so that every sum can be checked exactly.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from odc_mpi.bench.gloo import Gloo
from odc_mpi.comm.collective import Collectives
from odc_mpi.comm.reduction import AccumulateReduction, Reduction
from odc_mpi.comm.window import WindowTransport
from odc_mpi.comm.world import World
from odc_mpi.errors import UserError
from odc_mpi.shard.layout import FlatLayout, ParameterSpec

#: How gradients reach their owners, by the name that `comm.reduction` has for it.
REDUCTIONS: Mapping[str, type[Reduction]] = {"accumulate": AccumulateReduction}


def _nothing() -> None:
    return


@dataclass(frozen=True)
class Variant:
    """One way to move a unit.

    Attributes:
        operation: Moves it once.
        is_right: Whether it moves as it should, and did so far. Collective.
        gloo: The variant of gloo's to compare with.
        moves: Whether bytes move at all.
        one_sided: Whether a lone rank can do it.
        complete: Makes a lone rank's operation complete at its targets. One-sided.
        finish: Ends a row of operations, within the time. Collective.
        proceed: Makes ready for the next row, outside of the time. Collective.
    """

    operation: Callable[[], object]
    is_right: Callable[[], bool]
    gloo: str | None = None
    moves: bool = True
    one_sided: bool = False
    complete: Callable[[], object] = _nothing
    finish: Callable[[], object] = _nothing
    proceed: Callable[[], object] = _nothing


class Unit:
    """A unit of some size in all the memory that the variants need. Making and freeing one is collective.

    Args:
        world: The ranks.
        num_bytes: Of the whole unit, a multiple of 4.
        collectives: MPI's.
        gloo: None where it is left out.

    Attributes:
        variants: By name.
        crossing_bytes: What this rank does not own itself.

    Raises:
        UserError: Too little memory, on every rank.
    """

    def __init__(self, world: World, num_bytes: int, collectives: Collectives, gloo: Gloo | None) -> None:
        numel = num_bytes // 4
        layout = _layout(numel, world.size, trainable=True)
        _require_memory(world, layout)
        self.crossing_bytes = 4 * (numel - layout.shard_numel) if world.size > 1 else 0
        self._world, self._layout = world, layout
        self._transports: list[WindowTransport] = []
        # Written here, so touched. The whole unit, padded to equal shards, as a source and as a destination.
        self._ones = torch.ones(world.size * layout.shard_numel)
        self._whole = torch.zeros_like(self._ones)
        self._own = torch.full((layout.shard_numel,), world.rank + 1.0)
        self._sums = torch.zeros_like(self._own)
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
        self._ones = self._whole = self._own = self._sums = torch.empty(0)

    def _memcpy(self) -> Variant:
        source, target = self._ones[: self._layout.numel].numpy(), self._whole[: self._layout.numel].numpy()

        def copy() -> None:
            np.copyto(target, source)

        def is_right() -> bool:
            copy()
            return bool((target == 1).all())

        return Variant(copy, is_right)

    def _fetch(self, *, zero_copy: bool) -> Variant:
        transport = WindowTransport(self._world, zero_copy=zero_copy)
        self._transports.append(transport)
        transport.allocate([_layout(self._layout.numel, self._world.size, trainable=False)])
        transport.parameter_shard(0).copy_(self._own)
        transport.publish_parameters()

        def fetch() -> None:
            transport.release(transport.fetch(0).wait())

        def is_right() -> bool:
            fetched = transport.fetch(0).wait()
            right = self._is_whole(fetched)
            transport.release(fetched)
            return right

        return Variant(fetch, is_right, gloo="gloo_all_gather", moves=transport.copies, one_sided=True)

    def _gather(self, all_gather: Callable[[torch.Tensor, torch.Tensor], None]) -> Variant:
        def is_right() -> bool:
            self._whole.zero_()
            all_gather(self._own, self._whole)
            return self._is_whole(self._whole)

        return Variant(lambda: all_gather(self._own, self._whole), is_right, gloo="gloo_all_gather")

    def _push(self, make: type[Reduction]) -> Variant:
        made: list[Reduction] = []

        def reduction(*arguments: object) -> Reduction:
            made.append(make(*arguments))  # type: ignore[arg-type]
            return made[0]

        transport = WindowTransport(self._world, reduction=reduction)
        self._transports.append(transport)
        transport.allocate([self._layout])
        gradient = self._ones[: self._layout.numel]
        num_pushes = 0

        def push() -> None:
            nonlocal num_pushes
            num_pushes += 1
            transport.accumulate(0, gradient).wait()

        def is_right() -> bool:
            push()
            # A counts the pushes of all ranks, too.
            total = transport.complete_gradients(np.array([num_pushes])).sum()
            first, last = self._layout.owned(self._world.rank)
            right = bool((transport.gradient_shard(0)[: last - first] == total).all())
            transport.publish_parameters()
            return right

        return Variant(
            push,
            is_right,
            gloo="gloo_reduce_scatter",
            one_sided=True,
            complete=made[0].flush,
            finish=lambda: transport.complete_gradients(np.zeros(1)),
            proceed=transport.publish_parameters,
        )

    def _reduce(self, reduce_scatter: Callable[[torch.Tensor, torch.Tensor], None]) -> Variant:
        def is_right() -> bool:
            self._sums.zero_()
            reduce_scatter(self._ones, self._sums)
            return bool((self._sums == self._world.size).all())

        return Variant(lambda: reduce_scatter(self._ones, self._sums), is_right, gloo="gloo_reduce_scatter")

    def _is_whole(self, array: torch.Tensor) -> bool:
        """Whether every owner's part is there: each wrote its rank, counted from 1."""
        owned = ((owner, *self._layout.owned(owner)) for owner in range(self._world.size))
        return all(bool((array[start:stop] == owner + 1).all()) for owner, start, stop in owned)


def _layout(numel: int, num_owners: int, *, trainable: bool) -> FlatLayout:
    return FlatLayout.build("bench", [ParameterSpec("weight", (numel,), trainable)], num_owners)


def _require_memory(world: World, layout: FlatLayout) -> None:
    """Check that the ranks of this node find room, before the system ends one that does not. Collective."""
    # Each rank: two whole units and two shards, the buffer of a fetch, and as much again for the libraries' own; all
    # ranks together: the parameters of each transport, and the gradients of each reduction twice for a mailbox's slots.
    whole = 4 * world.size * layout.shard_numel
    wanted = world.local_size * 5 * whole + (2 + 3 * len(REDUCTIONS)) * whole
    world.agree(lambda: _check_available(wanted, world.local_size))


def _check_available(wanted: int, local_size: int) -> None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return  # No such file here: the system will say it its own way.
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    if wanted > free:
        raise UserError(
            f"{free >> 20} MiB of memory are available, expected at least {wanted >> 20} MiB for {local_size} ranks on "
            "this node: choose smaller --sizes or fewer --ranks"
        )

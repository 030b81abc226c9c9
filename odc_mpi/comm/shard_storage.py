"""Memory behind the shards of a store, and the layouts of the arrays in it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Layout(Protocol):
    """Layout of a flat array, as far as a transport needs it (`shard.layout.FlatLayout`)."""

    @property
    def name(self) -> str:
        """Name of the unit, for messages."""

    @property
    def numel(self) -> int:
        """Number of elements of the full array."""

    @property
    def shard_numel(self) -> int:
        """Number of elements of each shard. The last shards may reach beyond the end of the array."""

    @property
    def trainable(self) -> bool:
        """True if the array has gradients."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Type of the elements; None for that of the store."""

    def owned(self, rank: int) -> tuple[int, int]:
        """Return the range of elements that a rank owns."""

    def owners(self, start: int, stop: int) -> range:
        """Return the owners of elements `start` to `stop`."""


def ranges_by_owner(layout: Layout, rank: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield owner, start and stop of each part of the elements `start` to `stop` of an array.

    The first owner is the one after `rank`, so that not all ranks access rank 0 first.
    """
    for owner in sorted(layout.owners(start, stop), key=lambda owner: (owner <= rank, owner)):
        first, end = layout.owned(owner)
        yield owner, max(start, first), min(stop, end)


@dataclass(frozen=True)
class Footprint:
    """MPI windows and bytes of shared host memory that a storage needs."""

    num_windows: int = 0
    shared_bytes: int = 0

    def __add__(self, other: "Footprint") -> "Footprint":
        return Footprint(self.num_windows + other.num_windows, self.shared_bytes + other.shared_bytes)


class ShardStorage:
    """Owner of the memory of the shards of a store.

    A `Transport` calls `plan` and `allocate` once, `flush` and `complete` before and after the collective on complete
    gradients, `sync` before and after the one on published parameters, and `free` at the end. By default, `plan` only
    records the layouts, since private memory has an empty footprint, and the others have no effect.
    """

    layouts: Sequence[Layout] = ()

    def plan(self, layouts: Sequence[Layout]) -> Footprint:
        """Record the layouts; return the footprint of `allocate`. Raise `UserError` if a setting does not fit them."""
        self.layouts = tuple(layouts)
        return Footprint()

    @property
    def trainable_numels(self) -> dict[int, int]:
        """Number of elements of the shard of each trainable array, by index."""
        return {index: layout.shard_numel for index, layout in enumerate(self.layouts) if layout.trainable}

    def allocate(self) -> None:
        """Allocate the planned memory, filled with zeros. Collective; call once."""

    def flush(self) -> None:
        """Complete all pushes of this rank at their targets. One-sided."""

    def complete(self) -> None:
        """Add all received gradients to the shards."""

    def sync(self) -> None:
        """Synchronize the public and private copies of the windows (`MPI_Win_sync`). Does not communicate."""

    def mapped_memory(self) -> list[torch.Tensor]:
        """Return the host memory of the shards and of all that fetches read directly, without duplicates."""
        return []

    def free(self) -> None:
        """Free the memory. Tensors must not access it any more. Collective; call it within `World.collective`."""

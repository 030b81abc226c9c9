"""The memory that shards lie in, from its allocation past the ordering points to its end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Layout(Protocol):
    """What a transport needs to know of a flat array."""

    @property
    def name(self) -> str: ...
    @property
    def numel(self) -> int: ...
    @property
    def shard_numel(self) -> int: ...
    @property
    def trainable(self) -> bool: ...
    @property
    def dtype(self) -> torch.dtype | None: ...
    def owned(self, rank: int) -> tuple[int, int]: ...
    def owners(self, start: int, stop: int) -> range: ...


def ranges_by_owner(layout: Layout, rank: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Cut elements `start` to `stop` of an array among their owners.

    Owners behind `rank` come first: each rank begins with the next one, so that not all of them turn to rank 0 first.

    Yields:
        An owner, its first element, and the end of its elements.
    """
    for owner in sorted(layout.owners(start, stop), key=lambda owner: (owner <= rank, owner)):
        first, end = layout.owned(owner)
        yield owner, max(start, first), min(stop, end)


@dataclass(frozen=True)
class Footprint:
    """What hosting takes: windows, and bytes of the host's memory that other ranks can see."""

    num_windows: int = 0
    shared_bytes: int = 0

    def __add__(self, other: "Footprint") -> "Footprint":
        return Footprint(self.num_windows + other.num_windows, self.shared_bytes + other.shared_bytes)


class ShardStorage:
    """Memory of this rank that others reach, from its allocation past the ordering points to its end.

    Attributes:
        layouts: Of the arrays, once they are planned.
    """

    layouts: Sequence[Layout] = ()

    def plan(self, layouts: Sequence[Layout]) -> Footprint:
        """Prepare to host shards of these arrays, known by their index from here on.

        Returns:
            What that takes; nothing for memory that no other rank sees.

        Raises:
            UserError: A setting does not fit the arrays.
        """
        self.layouts = tuple(layouts)
        return Footprint()

    @property
    def trainable_numels(self) -> dict[int, int]:
        """Elements of this rank's shard of each trained array, by the array's index."""
        return {index: layout.shard_numel for index, layout in enumerate(self.layouts) if layout.trainable}

    def allocate(self) -> None:
        """Make the memory for what was planned, filled with zeros. Collective, once."""

    def flush(self) -> None:
        """Wait until everything that this rank pushed is with its owners: before A. One-sided."""

    def complete(self) -> None:
        """Make the shards hold everything that was pushed: after A."""

    def sync(self) -> None:
        """Make stores of owners and one-sided accesses see each other: before and after B."""

    def mapped_memory(self) -> list[torch.Tensor]:
        """Return the memory of the host that fetches read in place and shards lie in, each piece once."""
        return []

    def free(self) -> None:
        """Free the memory; nobody may look at it any more. Collective, within a meeting of the caller's."""

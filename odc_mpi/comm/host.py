"""The memory that shards lie in, from its allocation past the ordering points to its end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Layout(Protocol):
    """What a transport needs to know of a flat array."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def numel(self) -> int: ...  # noqa: D102
    @property
    def shard_numel(self) -> int: ...  # noqa: D102
    @property
    def trainable(self) -> bool: ...  # noqa: D102
    @property
    def dtype(self) -> torch.dtype | None: ...  # noqa: D102
    def owned(self, rank: int) -> tuple[int, int]: ...  # noqa: D102
    def owners(self, start: int, stop: int) -> range: ...  # noqa: D102


@dataclass(frozen=True)
class Footprint:
    """What hosting takes: windows, and bytes of the host's memory that other ranks can see."""

    num_windows: int = 0
    shared_bytes: int = 0

    def __add__(self, other: "Footprint") -> "Footprint":
        return Footprint(self.num_windows + other.num_windows, self.shared_bytes + other.shared_bytes)


class Host:
    """Memory of this rank that others reach, from its allocation past the ordering points to its end."""

    def plan(self, layouts: Sequence[Layout]) -> Footprint:
        """Prepare to host shards of these arrays, known by their index from here on. Local.

        Raises:
            UserError: A setting does not fit the arrays.
        """
        return Footprint()

    def allocate(self) -> None:
        """Make the memory for what was planned, filled with zeros. Collective, once."""

    def flush(self) -> None:
        """Wait until everything that this rank pushed is with its owners: before A. One-sided."""

    def complete(self) -> None:
        """Make the shards hold everything that was pushed: after A. Local."""

    def sync(self) -> None:
        """Make stores of owners and one-sided accesses see each other: before and after B. Local."""

    def in_place(self) -> list[torch.Tensor]:
        """Return the memory of the host that fetches read in place and shards lie in, each piece once. Local."""
        return []

    def free(self) -> None:
        """Free the memory; nobody may look at it any more. Collective, within a meeting of the caller's."""


class PrivateHost(Host):
    """Memory that no other rank sees: no window, and nothing of the memory that a node's ranks share.

    Attributes:
        layouts: Of the arrays, once they are known.
    """

    layouts: Sequence[Layout] = ()

    def plan(self, layouts: Sequence[Layout]) -> Footprint:  # noqa: D102
        self.layouts = tuple(layouts)
        return Footprint()

"""Memory of the shards of a parameter or gradient store, and the layouts of their arrays."""

from collections.abc import Iterator, Sequence

import torch

from odc_mpi.comm.layout import FlatLayout


def ranges_by_owner(shard_numel: int, rank: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Split the range `[start, stop)` of array elements by owner, and yield `(owner, start, stop)` for each part.

    The owners are in cyclic order, beginning with the first one after `rank`, so that not all ranks access rank 0
    first. Cache the result: with a thousand owners, computing it takes longer than issuing the operations.
    """
    owners = range(start // shard_numel, -(-stop // shard_numel)) if start < stop else ()
    for owner in sorted(owners, key=lambda owner: (owner <= rank, owner)):
        yield owner, max(start, owner * shard_numel), min(stop, (owner + 1) * shard_numel)


class ShardStorage:
    """Base class of objects that own the memory of parameter or gradient shards.

    A `Transport` calls `plan` and `allocate` once, and `free` at the end. It calls `flush` before and `complete` after
    `Group.gradients_complete`, `publish` before and `sync` before and after `Group.parameters_published`. By default,
    `plan` records the layouts and returns 0, as for private memory. The other methods do nothing by default.
    """

    layouts: Sequence[FlatLayout] = ()

    def plan(self, layouts: Sequence[FlatLayout]) -> int:
        """Record the layouts of the arrays, and return the number of bytes of shared host memory that `allocate` needs.

        Raises `UserError` if a setting, such as a buffer size, is too small for them.
        """
        self.layouts = tuple(layouts)
        return 0

    @property
    def trainable_numels(self) -> dict[int, int]:
        """Number of elements of this rank's shard of each trainable array, by the index of the array."""
        return {index: layout.shard_numel for index, layout in enumerate(self.layouts) if layout.trainable}

    def allocate(self) -> None:
        """Allocate the memory that `plan` computed, filled with zeros. Collective. Call it once."""

    def flush(self) -> None:
        """Complete all gradient pushes of this rank at their targets. One-sided."""

    def complete(self) -> None:
        """Add received gradients to this rank's shards, unless they have been added already."""

    def publish(self) -> None:
        """Send the parameters of this rank to the ranks that store copies of them. One-sided."""

    def sync(self) -> None:
        """Synchronize the public and private copies of the windows (`MPI_Win_sync`). Does not communicate."""

    def mapped_memory(self) -> list[torch.Tensor]:
        """Return the host memory mapped by this rank from which a device can copy if it is pinned. Empty by default."""
        return []

    def free(self) -> None:
        """Free the memory. Collective. Call it within `World.collective`, and do not access the shards afterwards."""

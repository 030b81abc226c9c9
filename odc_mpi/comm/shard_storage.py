"""Memory of the shards of a parameter or gradient store, and the layouts of their arrays."""

from collections.abc import Iterator, Sequence

import torch

from odc_mpi.comm.layout import FlatLayout


def ranges_by_owner(shard_numel: int, rank: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Split the range `[start, stop)` of array elements by owner and yield `(owner, start, stop)` for each part.

    Owners come in cyclic order, beginning with the first one after `rank`, so that ranks do not all access rank 0
    first. Cache the result, because with a thousand owners, computing it takes longer than issuing the operations.
    """
    owners = range(start // shard_numel, -(-stop // shard_numel)) if start < stop else ()
    for owner in sorted(owners, key=lambda owner: (owner <= rank, owner)):
        yield owner, max(start, owner * shard_numel), min(stop, (owner + 1) * shard_numel)


class ShardStorage:
    """Base class for owners of the memory of parameter or gradient shards.

    A `Transport` calls `plan` and `allocate` once, and `free` at the end. It calls `flush` before
    `Group.gradients_complete` and `complete` after it, `publish` before `Group.parameters_published`, and `sync` both
    before and after it. By default, `plan` records the layouts and returns 0, and the other methods do nothing.
    """

    layouts: Sequence[FlatLayout] = ()

    def plan(self, layouts: Sequence[FlatLayout]) -> int:
        """Record the layouts of the arrays and return how many bytes of shared host memory `allocate` needs.

        Raises `UserError` if a setting, such as a buffer size, is too small for the layouts.
        """
        self.layouts = tuple(layouts)
        return 0

    @property
    def trainable_numels(self) -> dict[int, int]:
        """Number of elements in this rank's shard of each trainable array, by array index."""
        return {index: layout.shard_numel for index, layout in enumerate(self.layouts) if layout.trainable}

    def allocate(self) -> None:
        """Allocate zero-filled memory for the planned layouts. Collective. Call this method only once."""

    def flush(self) -> None:
        """Complete all of this rank's gradient pushes at their targets. One-sided."""

    def complete(self) -> None:
        """Add received gradients to this rank's shards, unless they have already been added."""

    def publish(self) -> None:
        """Send this rank's parameters to the ranks that store copies of them. One-sided."""

    def sync(self) -> None:
        """Synchronize the public and private copies of the windows (`MPI_Win_sync`). Does not communicate."""

    def mapped_memory(self) -> list[torch.Tensor]:
        """Return the mapped host memory from which a device can copy once it is pinned. Empty by default."""
        return []

    def free(self) -> None:
        """Free the memory. Collective. Call this within `World.collective`, and do not access the shards afterwards."""

"""How gradients reach their owners: what every way offers, and the plain one, MPI_Accumulate.

    push       between B and A: starts to bring a gradient to its owners. One-sided
    flush      before a rank comes to A: its pushes are in their owners' hands
    serve      at any time: the owner does its part of what has arrived, if the way leaves it one
    complete   after all have met at A: the shards hold the sums

`comm.mailbox` has the other way, in which owners add.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from odc_mpi.comm.rma import Flush, Window
from odc_mpi.comm.transport import Layout, Pending
from odc_mpi.comm.world import World


class Reduction(ABC):
    """Hosts this rank's gradient shards and brings gradients to those of others. Making one is local.

    Args:
        world: The ranks.
        layouts: Of the flat arrays; those that are trained get a gradient shard, known by its index in this list.
        dtype: In which gradients travel and are summed.
    """

    #: What `comm.reduction` calls it.
    name: str

    def __init__(self, world: World, layouts: Sequence[Layout], dtype: torch.dtype) -> None:
        self.world = world
        self.layouts = tuple(layouts)
        self.dtype = dtype
        # Each rank begins with the next one, so that not all of them turn to rank 0 first.
        self.peers = [(world.rank + 1 + i) % world.size for i in range(world.size)]

    @property
    @abstractmethod
    def window_bytes(self) -> int:
        """Bytes that this rank's windows will take of the memory that others can see. Local."""

    @abstractmethod
    def allocate(self) -> None:
        """Make the shards and the windows. Collective, once."""

    @abstractmethod
    def shard(self, index: int) -> torch.Tensor:
        """Return this rank's gradients, `[shard_numel]` of `dtype`, zero at first. Local.

        Raises:
            KeyError: The array is not trained.
        """

    @abstractmethod
    def push(self, index: int, gradient: torch.Tensor, start: int) -> Pending:
        """Start to add a gradient into its owners' shards. One-sided.

        Args:
            index: Of the array.
            gradient: `[n]` of `dtype`, contiguous, on the host; untouched until the push is waited for.
            start: Of its first element in the flat array.
        """

    @abstractmethod
    def flush(self) -> None:
        """Return when everything this rank pushed is in its owners' hands. One-sided."""

    @abstractmethod
    def serve(self) -> None:
        """Do this owner's part of what has arrived. Local; may be called from another thread."""

    @abstractmethod
    def complete(self) -> None:
        """Make the shards hold everything that was pushed, after all ranks have flushed and met. Local."""

    @abstractmethod
    def sync(self) -> None:
        """Make this rank's stores into its shards, such as clearing them, seen before the next push. Local."""

    @abstractmethod
    def free(self) -> None:
        """Free the memory; nobody may look at the shards or serve any more. Collective."""

    def pieces(self, index: int, gradient: torch.Tensor, start: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Cut a gradient among its owners. Local.

        Args:
            index: As for `push`.
            gradient: As for `push`.
            start: As for `push`.

        Yields:
            An owner, the first element in its shard, and the values from there on.
        """
        assert gradient.dtype == self.dtype
        layout, values, stop = self.layouts[index], gradient.numpy(), start + gradient.numel()
        owners = layout.owners(start, stop)
        for owner in self.peers:
            if owner in owners:
                first, last = layout.owned(owner)
                begin, end = max(start, first), min(stop, last)
                yield owner, begin - first, values[begin - start : end - start]


class AccumulateReduction(Reduction):
    """MPI_Accumulate(MPI_SUM) into the owners' gradient windows; owners take no part.

    One window per array, because MPICH serialises all Accumulates of a window on a node.
    """

    name = "accumulate"

    def __init__(self, world: World, layouts: Sequence[Layout], dtype: torch.dtype) -> None:
        super().__init__(world, layouts, dtype)
        self._windows: dict[int, Window] = {}

    @property
    def window_bytes(self) -> int:  # noqa: D102
        return sum(layout.shard_numel for layout in self.layouts if layout.trainable) * self.dtype.itemsize

    def allocate(self) -> None:  # noqa: D102
        for index, layout in enumerate(self.layouts):
            if layout.trainable:
                self._windows[index] = Window(self.world, layout.shard_numel, self.dtype)

    def shard(self, index: int) -> torch.Tensor:  # noqa: D102
        return self._windows[index].tensor

    def push(self, index: int, gradient: torch.Tensor, start: int) -> Pending:  # noqa: D102
        layout, window = self.layouts[index], self._windows[index]
        what = f"accumulating the gradient of unit {layout.name}"
        owners = layout.owners(start, start + gradient.numel())
        with self.world.deadline(what, owners):
            for owner, begin, values in self.pieces(index, gradient, start):
                window.accumulate(owner, begin, values)
        # At this end only: the buffer may be reused. `flush` completes it at the targets.
        return Flush(self.world, window.flush_local, what, owners)

    def flush(self) -> None:  # noqa: D102
        with self.world.deadline("flushing gradients"):
            for window in self._windows.values():
                window.flush()

    def serve(self) -> None:
        """Nothing is left to the owner. Local."""

    def complete(self) -> None:  # noqa: D102
        self.sync()

    def sync(self) -> None:  # noqa: D102
        for window in self._windows.values():
            window.sync()

    def free(self) -> None:  # noqa: D102
        for window in reversed(self._windows.values()):
            window.free()
        self._windows = {}

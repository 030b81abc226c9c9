"""How gradients reach their owners: what every way offers, and the plain one, MPI_Accumulate.

    push       between B and A: starts to bring a gradient to its owners. One-sided
    flush      before a rank comes to A: its pushes are in their owners' hands
    serve      at any time: the owner does its part of what has arrived, if the way leaves it one
    complete   after all have met at A: the shards hold the sums

`comm.reduce.mailbox` has the other way, in which owners add.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from odc_mpi.comm.transport import Layout, Pending
from odc_mpi.comm.windows.rma import Flush, Memory, Window
from odc_mpi.runtime.world import World

#: So many ranks of a node can add at once to an array; more were not measured.
MAX_WINDOWS_PER_ARRAY = 4
#: Of all arrays together, if that is to be had: a library may have room for no more (`comm.windows.window`), and those
#: of the parameters want some, too.
MAX_WINDOWS = 800


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
    def num_windows(self) -> int:
        """How many windows it will make. Local."""

    @property
    @abstractmethod
    def window_bytes(self) -> int:
        """Bytes that this rank's windows will take of the host's memory that others can see. Local."""

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
            gradient: `[n]` of `dtype`, contiguous, where the shards are; untouched until the push is waited for.
            start: Of its first element in the flat array.
        """

    @abstractmethod
    def flush(self) -> None:
        """Return when everything this rank pushed is in its owners' hands. One-sided."""

    @abstractmethod
    def serve(self) -> bool:
        """Do this owner's part of what has arrived; return whether any has. Local, from any thread."""

    @abstractmethod
    def complete(self) -> None:
        """Make the shards hold everything that was pushed, after all ranks have flushed and met. Local."""

    @abstractmethod
    def sync(self) -> None:
        """Make this rank's stores into its shards, such as clearing them, seen before the next push. Local."""

    @abstractmethod
    def free(self) -> None:
        """Free the memory; nobody may look at the shards or serve any more. Collective."""

    def values(self, gradient: torch.Tensor) -> Memory:
        """Return the memory of a gradient as MPI takes it. Local."""
        assert gradient.dtype == self.dtype
        return gradient.numpy()

    def pieces(self, index: int, start: int, stop: int) -> Iterator[tuple[int, int, slice]]:
        """Cut a gradient among its owners. Local.

        Args:
            index: Of the array.
            start: The gradient's first element in the flat array.
            stop: Behind its last.

        Yields:
            An owner, the first element in its shard, and which part of the gradient goes from there on.
        """
        layout = self.layouts[index]
        owners = layout.owners(start, stop)
        for owner in self.peers:
            if owner in owners:
                first, last = layout.owned(owner)
                begin, end = max(start, first), min(stop, last)
                yield owner, begin - first, slice(begin - start, end - start)


class AccumulateReduction(Reduction):
    """MPI_Accumulate(MPI_SUM) into the owners' gradient windows; owners take no part.

    MPICH serialises all Accumulates of a window on a node, also those to different owners. There an array has several
    windows, and each rank has its shard in one of them: two ranks that push 16 MB at once take half of the time.
    """

    name = "accumulate"

    def __init__(self, world: World, layouts: Sequence[Layout], dtype: torch.dtype) -> None:
        super().__init__(world, layouts, dtype)
        self._indices = [index for index, layout in enumerate(layouts) if layout.trainable]
        self._per_array = windows_per_array(world.mpi_library, world.size, len(self._indices))
        self._windows: dict[int, list[Window]] = {}

    @property
    def num_windows(self) -> int:  # noqa: D102
        return len(self._indices) * self._per_array

    @property
    def window_bytes(self) -> int:  # noqa: D102
        return sum(self.layouts[index].shard_numel for index in self._indices) * self.dtype.itemsize

    def allocate(self) -> None:  # noqa: D102
        self._windows = {index: self._share_out(self.layouts[index].shard_numel) for index in self._indices}

    def shard(self, index: int) -> torch.Tensor:  # noqa: D102
        return self._window(index, self.world.rank).tensor

    def push(self, index: int, gradient: torch.Tensor, start: int) -> Pending:  # noqa: D102
        layout, values, stop = self.layouts[index], self.values(gradient), start + gradient.numel()
        what = f"accumulating the gradient of unit {layout.name}"
        owners = layout.owners(start, stop)
        with self.world.deadline(what, owners):
            for owner, begin, part in self.pieces(index, start, stop):
                self._window(index, owner).accumulate(owner, begin, values[part])
        # At this end only: the buffer may be reused. `flush` completes it at the targets.
        return Flush(self.world, lambda: self._flush_local(index), what, owners, gradient)

    def flush(self) -> None:  # noqa: D102
        with self.world.deadline("flushing gradients"):
            for window in self._all_windows():
                window.flush()

    def serve(self) -> bool:
        """Nothing is left to the owner. Local."""
        return False

    def complete(self) -> None:  # noqa: D102
        self.sync()

    def sync(self) -> None:  # noqa: D102
        for window in self._all_windows():
            window.sync()

    def free(self) -> None:  # noqa: D102
        for window in reversed(list(self._all_windows())):
            window.free()
        self._windows = {}

    def _share_out(self, numel: int) -> list[Window]:
        own = self.world.rank % self._per_array
        return [self._make_window(numel if i == own else 0) for i in range(self._per_array)]

    def _make_window(self, numel: int) -> Window:
        return Window(self.world, numel, self.dtype, same_size=self._per_array == 1)

    def _window(self, index: int, owner: int) -> Window:
        return self._windows[index][owner % self._per_array]

    def _all_windows(self) -> Iterator[Window]:
        return chain.from_iterable(self._windows.values())

    def _flush_local(self, index: int) -> None:
        for window in self._windows[index]:
            window.flush_local()


def windows_per_array(library: str, num_ranks: int, num_arrays: int) -> int:
    """Return how many windows share out the owners of an array, so that ranks can add at the same time. Local.

    Args:
        library: What `World.mpi_library` says.
        num_ranks: Of the world.
        num_arrays: How many arrays get windows.
    """
    if not library.startswith("MPICH"):
        return 1  # Open MPI has a lock for each target.
    return max(1, min(num_ranks, MAX_WINDOWS_PER_ARRAY, MAX_WINDOWS // max(1, num_arrays)))

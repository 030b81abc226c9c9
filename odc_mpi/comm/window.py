"""The seam over MPI windows.

Every rank allocates one window per flat array for parameters and, where the array is trained, one for gradients. Peers
read the first with MPI_Get and add into the second with MPI_Accumulate(MPI_SUM); the owner takes no part.

    passive epoch     one Lock_all(NOCHECK) for the life of a window (MPI-4.1, 12.5.3)
    fetch             Get from each owner, then Flush_all of that window
    push              Accumulate to each owner, then Flush_local_all: the origin buffer may be reused
    A                 Flush_all of every gradient window, then all meet (an all-gather), then Sync: owners may read
    B                 Sync: what owners wrote is in the window; then all meet (a barrier), then Sync

Windows come from `Win.Allocate`: over `Win.Create` on host memory both MPICH and Open MPI make a Get wait until its
target calls MPI. One window per array, because MPICH serialises all Accumulates of a window on a node.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from mpi4py import MPI

from odc_mpi.comm.transport import Layout, Pending, Transport
from odc_mpi.comm.world import World

#: How reduced elements are described to MPI. Nothing else may be summed: bf16 would be added as bytes.
_MPI_DTYPES = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}
#: One message carries at most this many elements: counts are C ints in many MPI libraries.
MAX_MESSAGE_NUMEL = 1 << 27


class Window:
    """A shard of `[numel]` on every rank, open to one-sided access. Creating and freeing one is collective.

    Attributes:
        tensor: This rank's shard, over the window's memory, zero at first.
    """

    def __init__(self, world: World, numel: int, dtype: torch.dtype) -> None:
        self._world = world
        # Sums name their element type; everything else, bf16 included, travels as bytes of the same size.
        self._element = _MPI_DTYPES.get(dtype, MPI.BYTE)
        self._elements_per_item = 1 if dtype in _MPI_DTYPES else dtype.itemsize
        with world.deadline("allocating a window"):
            # `same_size` lets the library leave out a table of sizes; no other hint was found to matter.
            info = MPI.Info.Create({"same_size": "true", "same_disp_unit": "true"})
            self._win = MPI.Win.Allocate(numel * dtype.itemsize, dtype.itemsize, info, world.comm)
            info.Free()
            self._win.Lock_all(MPI.MODE_NOCHECK)
        self.tensor = torch.frombuffer(self._win.tomemory(), dtype=dtype, count=numel)
        # Also the first touch, which would otherwise slow down the first fetch.
        self.tensor.zero_()

    def get(self, target: int, buffer: np.ndarray) -> None:
        """Start to read the first elements of a rank's shard into bytes. One-sided; `flush` completes it."""
        itemsize = self.tensor.itemsize
        step = MAX_MESSAGE_NUMEL * itemsize
        for start in range(0, buffer.size, step):
            piece = buffer[start : start + step]
            self._win.Get([piece, MPI.BYTE], target, (start // itemsize, piece.size, MPI.BYTE))

    def accumulate(self, target: int, start: int, values: np.ndarray) -> None:
        """Start to add values into a rank's shard. One-sided; `flush_local` lets go of the values."""
        assert self._elements_per_item == 1, "only what MPI can add is accumulated"
        for first in range(0, values.size, MAX_MESSAGE_NUMEL):
            piece = values[first : first + MAX_MESSAGE_NUMEL]
            place = (start + first, piece.size, self._element)
            self._win.Accumulate([piece, self._element], target, place, MPI.SUM)

    def flush(self) -> None:
        """Complete everything that this rank started, at the targets. One-sided."""
        self._win.Flush_all()

    def flush_local(self) -> None:
        """Complete everything that this rank started, at this end: buffers may be reused. One-sided."""
        self._win.Flush_local_all()

    def sync(self) -> None:
        """Make loads and stores of the owner and one-sided accesses see each other. Local."""
        self._win.Sync()

    def free(self) -> None:
        """End the epoch and free the memory; nothing may look at `tensor` any more. Collective."""
        self.tensor = torch.empty(0)
        self._win.Unlock_all()
        self._win.Free()


class WindowTransport(Transport):
    """Shards in MPI windows on host memory.

    Args:
        world: The ranks that share every array.
        param_dtype: As for any transport.
        reduce_dtype: As for any transport.
    """

    name = "window"

    def __init__(
        self, world: World, param_dtype: torch.dtype = torch.float32, reduce_dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(world.rank, world.size, param_dtype, reduce_dtype)
        self._world = world
        self.threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._parameters: list[Window] = []
        self._gradients: dict[int, Window] = {}
        # Each rank begins with the next one, so that not all of them ask rank 0 first.
        self._peers = [(world.rank + 1 + i) % world.size for i in range(world.size)]

    def allocate(self, layouts: Sequence[Layout]) -> None:  # noqa: D102
        assert not self.layouts, "a transport allocates once"
        self.layouts = tuple(layouts)
        trainable = sum(layout.shard_numel for layout in layouts if layout.trainable)
        num_bytes = self.parameter_shard_bytes + trainable * self.reduce_dtype.itemsize
        self._world.require_shared_memory(num_bytes, "the parameter and gradient windows")
        self._world.on_close(self.close)
        # One for each point: a rank that leaves one out waits at the next, where its deadline names it, instead of
        # taking the others' numbers for what they are not.
        with self._world.deadline("duplicating the communicator"):
            self._at_a, self._at_n, self._at_b = (self._world.comm.Dup() for _ in range(3))
        for index, layout in enumerate(layouts):
            self._parameters.append(Window(self._world, layout.shard_numel, self.param_dtype))
            if layout.trainable:
                self._gradients[index] = Window(self._world, layout.shard_numel, self.reduce_dtype)
        # Nobody may push into a window that its owner is still clearing.
        self.publish_parameters()

    def parameter_shard(self, index: int) -> torch.Tensor:  # noqa: D102
        return self._parameters[index].tensor

    def gradient_shard(self, index: int) -> torch.Tensor:  # noqa: D102
        return self._gradients[index].tensor

    def start_fetch(self, index: int, buffer: torch.Tensor) -> Pending:  # noqa: D102
        layout, window = self.layouts[index], self._parameters[index]
        data = buffer.view(torch.uint8).numpy()
        what = f"fetching unit {layout.name}"
        with self._world.deadline(what):
            for owner in self._peers:
                start, stop = layout.owned(owner)
                if start < stop and owner != self.rank:
                    window.get(owner, data[start * buffer.itemsize : stop * buffer.itemsize])
        start, stop = layout.owned(self.rank)
        buffer[start:stop].copy_(window.tensor[: stop - start])
        return _Flush(window.flush, self._world, what)

    def accumulate(self, index: int, gradient: torch.Tensor, start: int = 0) -> Pending:  # noqa: D102
        layout, window = self.layouts[index], self._gradients[index]
        assert gradient.dtype == self.reduce_dtype
        values, stop = gradient.numpy(), start + gradient.numel()
        owners = layout.owners(start, stop)
        what = f"accumulating the gradient of unit {layout.name}"
        with self._world.deadline(what):
            for owner in self._peers:
                if owner in owners:
                    first, last = layout.owned(owner)
                    begin, end = max(start, first), min(stop, last)
                    window.accumulate(owner, begin - first, values[begin - start : end - start])
        return _Flush(window.flush_local, self._world, what)

    def complete_gradients(self, report: np.ndarray) -> np.ndarray:  # noqa: D102
        with self._world.deadline("flushing gradients"):
            for window in self._gradients.values():
                window.flush()
        reports = self._allgather(self._at_a, report, "meeting at point A, gradients complete")
        for window in self._gradients.values():
            window.sync()
        return reports

    def sum_over_ranks(self, values: np.ndarray) -> np.ndarray:  # noqa: D102
        # An all-gather summed here: some libraries' all-reduce adds in an order that differs from rank to rank.
        return self._allgather(self._at_n, values, "meeting at point N, norm").sum(axis=0)

    def publish_parameters(self) -> None:  # noqa: D102
        windows = [*self._parameters, *self._gradients.values()]
        for window in windows:
            window.sync()
        self.num_collectives += 1
        self._world.wait(self._at_b.Ibarrier(), "meeting at point B, parameters published")
        for window in windows:
            window.sync()

    def broadcast(self, tensor: torch.Tensor) -> None:  # noqa: D102
        self._world.broadcast(tensor)

    def close(self) -> None:  # noqa: D102
        with self._world.deadline("freeing the windows"):
            for window in [*reversed(self._gradients.values()), *reversed(self._parameters)]:
                window.free()
            if self._parameters:
                for comm in (self._at_a, self._at_n, self._at_b):
                    comm.Free()
        self._gradients, self._parameters = {}, []
        self.buffers.clear()

    def _allgather(self, comm: MPI.Intracomm, values: np.ndarray, what: str) -> np.ndarray:
        values = np.ascontiguousarray(values, dtype=np.float64)
        everyone = np.empty((self.size, values.size))
        self.num_collectives += 1
        self._world.wait(comm.Iallgather(values, everyone), what)
        return everyone


class _Flush:
    """Completes what was started on a window."""

    def __init__(self, flush: Callable[[], None], world: World, what: str) -> None:
        self._flush, self._world, self._what = flush, world, what

    def wait(self) -> None:
        with self._world.deadline(self._what):
            self._flush()

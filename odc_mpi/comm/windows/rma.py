"""One piece of memory on every rank, open to the others: the MPI windows that everything else is built from.

    Window         from `Win.Allocate`: read, written and added to with one-sided operations
    SharedWindow   from `Win.Allocate_shared` on each node (`comm.windows.shared_window`): the ranks of a node see each
                   other's memory in place, and those of other nodes read it with one-sided operations
    DeviceWindow   over a device's memory (`comm.windows.device_window`)

All hold one passive epoch, Lock_all(NOCHECK), for all their life (MPI-4.1, 12.5.3), and are of the unified memory
model: owners read and write their memory with plain loads and stores. Over `Win.Create` on host memory both MPICH and
Open MPI make a Get from the same node wait until its target calls MPI. So there it serves only where no same-node peer
uses it: for the way from other nodes into a `SharedWindow`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from mpi4py import MPI
from torch.multiprocessing.reductions import StorageWeakRef

from odc_mpi.comm.work import DeferredWork
from odc_mpi.errors import UserError
from odc_mpi.runtime.library import memory_model
from odc_mpi.runtime.world import World

#: Flat memory that an operation reads or fills: of the host an array, of a device a view that knows its address and
#: that nobody looks into. Both have a length in elements and can be cut.
Memory: TypeAlias = np.ndarray | memoryview
#: How reduced elements are described to MPI. Nothing else may be summed: bf16 would be added as bytes.
MPI_DTYPES = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE, torch.int64: MPI.INT64_T}
#: One message carries at most this many elements: counts are C ints in many MPI libraries.
MAX_MESSAGE_NUMEL = 1 << 27
#: What begins in a window begins at a multiple of so many bytes, a cache line.
ALIGNMENT = 64
#: Whether tensors that look at a window's memory can be given memory of their own when it is freed: not by older
#: versions of torch.
CAN_DETACH_STORAGE = hasattr(torch.UntypedStorage, "_swap_data_ptr_")


class ReadableWindow(Protocol):
    """What all windows have in common: a shard on every rank, which others read.

    Attributes:
        tensor: This rank's shard.
        all_shards: All shards as one array, where this rank sees it in place; else None.
    """

    tensor: torch.Tensor
    all_shards: torch.Tensor | None

    def mapped_shard(self, target: int) -> torch.Tensor | None: ...
    def mapped_memory(self) -> list[torch.Tensor]: ...
    def get(self, target: int, buffer: Memory, start: int = 0) -> None: ...
    def flush(self) -> None: ...
    def sync(self) -> None: ...
    def free(self) -> None: ...


class Window:
    """A shard of `[numel]` on every rank. Creating and freeing one is collective.

    Args:
        world: The ranks.
        numel: Elements of this rank.
        dtype: Of the elements.
        same_size: Whether all ranks have as many. Otherwise some may have none.

    Attributes:
        tensor: This rank's shard, over the window's memory, zero at first.
        all_shards: None: no rank sees the shards of others in place, as those of a `SharedWindow`.
    """

    all_shards: torch.Tensor | None = None

    def __init__(self, world: World, numel: int, dtype: torch.dtype, *, same_size: bool = True) -> None:
        self._rank = world.rank
        # Sums name their element type; everything else, bf16 included, travels as bytes of the same size.
        self._element = MPI_DTYPES.get(dtype, MPI.BYTE)
        with world.collective("allocating a window"):
            # `same_size` lets the library leave out a table of sizes; no other hint was found to matter.
            info = MPI.Info.Create({"same_size": str(same_size).lower(), "same_disp_unit": "true"})
            self._win, self.tensor = self._make(world, numel, dtype, info)
            info.Free()
            open_epoch(self._win, world)
        # Also the first touch, which would otherwise slow down the first fetch.
        self.tensor.zero_()
        # Once the ranks have met, others may read it, or add to it.
        self.sync()

    def mapped_shard(self, target: int) -> torch.Tensor | None:
        """Return this rank's own shard; None for others."""
        return self.tensor if target == self._rank else None

    def mapped_memory(self) -> list[torch.Tensor]:
        """Return this rank's own shard."""
        return [self.tensor]

    def get(self, target: int, buffer: Memory, start: int = 0) -> None:
        """Start to read elements of a rank's shard, from `start` on, into bytes. One-sided; `flush` completes it."""
        read_shard(self._win, target, buffer, self.tensor.itemsize, start)

    def put(self, target: int, start: int, values: Memory) -> None:
        """Start to overwrite elements of a rank's shard from `start` on. One-sided; `flush` completes it.

        Args:
            target: The rank.
            start: First element.
            values: Bytes, a whole number of elements; untouched until the flush.
        """
        itemsize = self.tensor.itemsize
        step = MAX_MESSAGE_NUMEL * itemsize
        for first in range(0, len(values), step):
            piece = values[first : first + step]
            self._win.Put([piece, MPI.BYTE], target, (start + first // itemsize, len(piece), MPI.BYTE))

    def accumulate(self, target: int, start: int, values: Memory) -> None:
        """Start to add values into a rank's shard. One-sided; `flush_local` lets go of the values."""
        assert self._element != MPI.BYTE, "only what MPI can add is accumulated"
        for first in range(0, len(values), MAX_MESSAGE_NUMEL):
            piece = values[first : first + MAX_MESSAGE_NUMEL]
            place = (start + first, len(piece), self._element)
            self._win.Accumulate([piece, self._element], target, place, MPI.SUM)

    def fetch_and_add(self, target: int, offset: int, value: int) -> int:
        """Add to an int64 element of a rank's shard and return what was there before, at once. One-sided."""
        return self._fetch_and(MPI.SUM, target, offset, value)

    def atomic_read(self, target: int, offset: int) -> int:
        """Return an int64 element of a rank's shard, as `fetch_and_add` and `atomic_store` leave it. One-sided."""
        return self._fetch_and(MPI.NO_OP, target, offset, 0)

    def atomic_store(self, target: int, offset: int, value: int) -> None:
        """Overwrite an int64 element of a rank's shard at once, as `fetch_and_add` sees it. One-sided."""
        self._fetch_and(MPI.REPLACE, target, offset, value)

    def compare_and_swap(self, target: int, offset: int, expected: int, value: int) -> int:
        """Overwrite an int64 element of a rank's shard if it is as expected; return what was there. One-sided."""
        assert self.tensor.dtype == torch.int64, "counters are int64"
        given, compared, before = (np.array([number], dtype=np.int64) for number in (value, expected, 0))
        self._win.Compare_and_swap(given, compared, before, target, offset)
        self._win.Flush(target)
        return int(before[0])

    def atomic_read_all(self, target: int, count: int) -> np.ndarray:
        """Return the first elements of a rank's shard, int64 [count], each as `read` does. One-sided."""
        return self._exchange_all(MPI.NO_OP, target, np.zeros(count, dtype=np.int64))

    def atomic_store_all(self, target: int, values: np.ndarray) -> None:
        """Overwrite the first elements of a rank's shard, int64 [count], each as `atomic_store` does. One-sided."""
        self._exchange_all(MPI.REPLACE, target, values)

    def _exchange_all(self, operation: MPI.Op, target: int, values: np.ndarray) -> np.ndarray:
        assert self.tensor.dtype == torch.int64, "counters are int64"
        before = np.empty_like(values)
        place = (0, len(values), MPI.INT64_T)
        self._win.Get_accumulate([values, MPI.INT64_T], [before, MPI.INT64_T], target, place, operation)
        self._win.Flush(target)
        return before

    def _fetch_and(self, operation: MPI.Op, target: int, offset: int, value: int) -> int:
        assert self.tensor.dtype == torch.int64, "counters are int64"
        given, before = np.array([value], dtype=np.int64), np.empty(1, dtype=np.int64)
        self._win.Fetch_and_op([given, MPI.INT64_T], [before, MPI.INT64_T], target, offset, operation)
        self._win.Flush(target)
        return int(before[0])

    def flush(self, target: int | None = None) -> None:
        """Complete what this rank started, at one target or at all. One-sided."""
        if target is None:
            self._win.Flush_all()
        else:
            self._win.Flush(target)

    def flush_local(self) -> None:
        """Complete everything that this rank started, at this end: buffers may be reused. One-sided."""
        self._win.Flush_local_all()

    def sync(self) -> None:
        """Make loads and stores of the owner and one-sided accesses see each other."""
        self._win.Sync()

    def free(self) -> None:
        """End the epoch and free the memory; who still looks at `tensor` sees a copy. Collective."""
        seen, self.tensor = StorageWeakRef(self.tensor.untyped_storage()), torch.empty(0)
        free_window(self._win, [seen])

    def _make(self, world: World, numel: int, dtype: torch.dtype, info: MPI.Info) -> tuple[MPI.Win, torch.Tensor]:
        """Make the memory and the window over it, within a meeting. Collective."""
        win = MPI.Win.Allocate(numel * dtype.itemsize, dtype.itemsize, info, world.comm)
        if not numel:
            return win, torch.empty(0, dtype=dtype)
        return win, torch.frombuffer(win.tomemory(), dtype=dtype, count=numel)


@dataclass(frozen=True)
class WindowFactory:
    """Where the windows of a store are.

    Attributes:
        make: Makes one of `(world, numel, dtype)`.
        memory: Returns a flat tensor's memory as MPI takes it, for tensors where the windows are.
        on_host: Whether they are in the host's memory.
        shared: Whether the ranks of a node see each other's.
    """

    make: Callable[..., Any]
    memory: Callable[[torch.Tensor], Memory] = torch.Tensor.numpy
    on_host: bool = True
    shared: bool = False


HOST_WINDOW = WindowFactory(Window)


def align_up(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """Return the next multiple of the alignment."""
    return -(-num_bytes // alignment) * alignment


def deferred_flush(
    world: World, flush: Callable[[], None], what: str, owners: Iterable[int], memory: torch.Tensor
) -> DeferredWork:
    """Return operations that were started on a window, to be completed where they are waited for.

    Args:
        world: Gives the wait its deadline.
        flush: The window's method that completes them.
        what: What is waited for, to follow "while".
        owners: The ranks at whose memory the operations are.
        memory: What the operations read or fill. MPI holds no reference: without one here, memory that the caller lets
            go of between start and wait would be somebody else's by the time it travels.
    """

    def complete(_memory: torch.Tensor) -> None:
        with world.deadline(what, owners):
            flush()

    return DeferredWork(partial(complete, memory))


def read_shard(win: MPI.Win, target: int, buffer: Memory, itemsize: int, start: int) -> None:
    """Start to read elements of so many bytes each, from `start` on, into bytes. One-sided."""
    step = MAX_MESSAGE_NUMEL * itemsize
    for first in range(0, len(buffer), step):
        piece = buffer[first : first + step]
        win.Get([piece, MPI.BYTE], target, (start + first // itemsize, len(piece), MPI.BYTE))


def open_epoch(win: MPI.Win, world: World) -> None:
    """Begin the epoch of a window, or free it. Collective in the latter case.

    Raises:
        UserError: Loads and stores of its owner do not see what others do to it.
    """
    model = memory_model(win)
    if model != "unified":
        win.Free()
        raise UserError(
            f"expected windows of the unified memory model (MPI_WIN_UNIFIED), got {model} ones under "
            f"{world.mpi_library}: use another MPI library"
        )
    win.Lock_all(MPI.MODE_NOCHECK)


def free_window(win: MPI.Win, views: Iterable[StorageWeakRef] = ()) -> None:
    """Free a window. Collective.

    A tensor that somebody holds longer would crash the process, so it gets memory of its own.

    Args:
        win: The window.
        views: Memory of the window that tensors look at.
    """
    for reference in views:
        held = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        if held is not None and CAN_DETACH_STORAGE:
            held._swap_data_ptr_(held.clone())  # type: ignore[attr-defined]
    win.Unlock_all()
    win.Free()

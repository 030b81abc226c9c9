"""MPI windows: memory on every rank that other ranks access by RMA operations.

    Window         `Win.Allocate`
    SharedWindow   `Win.Allocate_shared`: ranks on the same node map each other's memory; ranks on other nodes read it
                   with MPI_Get
    PrivateWindow  `Win.Create`: memory that no other rank maps
    DeviceWindow   device memory (`comm.windows.device_window`)

A window has a single passive-target epoch, `Lock_all(MODE_NOCHECK)`, from its creation until it is freed (MPI-4.1,
12.5.3). The memory model must be unified, because each rank accesses its own memory by load and store. With MPICH and
Open MPI, a Get within a node waits until the target calls MPI if `Win.Create` made the window from host memory, so
`SharedWindow` uses `Win.Create` only for Gets between nodes.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from mpi4py import MPI
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from odc_mpi.comm.work import Work
from odc_mpi.errors import UserError
from odc_mpi.runtime.library import memory_model
from odc_mpi.runtime.world import World

#: Flat buffer for an RMA operation: a host array, or a view of host or device memory from `as_mpi_buffer`.
Memory: TypeAlias = np.ndarray | memoryview
#: Part of an RMA operation between a buffer and other ranks' windows: the target rank, the first element in its shard,
#: and a pair `(numel, first element in the buffer)`, as mpi4py expects. Elements have the size of the window's dtype.
Message: TypeAlias = tuple[int, int, tuple[int, int]]
#: MPI windows, in the order in which they are freed, and the mapped shards by owner.
WindowParts: TypeAlias = tuple[list[MPI.Win], dict[int, torch.Tensor]]
#: MPI datatypes for the dtypes that MPI can sum, which exclude bf16.
MPI_DTYPES = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE, torch.int64: MPI.INT64_T}
#: MPI datatypes for elements that are only copied, by element size, because MPI has no bf16 and counts in bytes would
#: overflow a C int earlier.
COPY_DTYPES = {1: MPI.BYTE, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}
#: Format characters for `memoryview`. Elements that are only copied are treated as bytes.
_TYPE_CODES: dict[torch.dtype, Any] = {torch.float32: "f", torch.float64: "d", torch.int64: "q", torch.uint8: "B"}
#: Maximum number of elements per message. In many MPI libraries, counts are C ints.
MAX_MESSAGE_NUMEL = 1 << 27
#: Maximum number of bytes per Get between nodes with Open MPI. Over TCP, Open MPI's request is as long as the requested
#: data, or twice as long if it exceeds this maximum (benchmarks/notes/upstream.md).
OPEN_MPI_MAX_GET_BYTES = (1 << 17) - 256
#: Alignment of data in a window, in bytes: the size of a cache line.
ALIGNMENT = 64
#: True if this torch version can replace the memory of a tensor, so that views of a window outlive the window.
CAN_DETACH_STORAGE = hasattr(torch.UntypedStorage, "_swap_data_ptr_")


class Window:
    """MPI window in host memory. Each rank has a zero-filled shard, `[numel]` of `dtype`. Construction is collective.

    `same_size` is True if `numel` is the same on all ranks. Raises `UserError` if the MPI library's memory model is not
    MPI_WIN_UNIFIED.

    Attributes:
        tensor: This rank's shard, `[numel]` of `dtype`.
    """

    def __init__(self, world: World, numel: int, dtype: torch.dtype, *, same_size: bool = True) -> None:
        self._views: list[torch.Tensor] = []
        self._copied, self._summed = COPY_DTYPES[dtype.itemsize], MPI_DTYPES.get(dtype)
        is_split = world.num_nodes > 1 and world.mpi_library.startswith("Open MPI")
        self._max_get_numel = OPEN_MPI_MAX_GET_BYTES // dtype.itemsize if is_split else MAX_MESSAGE_NUMEL
        with world.collective("allocating a window"):
            # `same_size` saves the library a table of sizes. No other hint has been found to matter.
            info = MPI.Info.Create({"same_size": str(same_size).lower(), "same_disp_unit": "true"})
            self._wins, self._mapped_shards = self._make(world, numel, dtype, info)
            info.Free()
            self._open_epochs(world)
        # Operations use the first window. Others own its memory.
        self._win = self._wins[0]
        self.tensor = self._mapped_shards[world.rank]
        # This first touch of the pages would otherwise slow down the first fetch.
        self.tensor.zero_()
        # Other ranks may access the shard after this call and a collective.
        self.sync()

    def mapped_shard(self, target: int) -> torch.Tensor | None:
        """Return a view of the shard of rank `target`, or None if this rank does not map it."""
        return self._mapped_shards.get(target)

    @property
    def mapped_memory(self) -> torch.Tensor:
        """Memory of all shards that this rank maps into its address space, as one tensor."""
        return self.tensor

    def get_messages(self, buffer: Memory, parts: Iterable[Message], base: int = 0) -> None:
        """Start copying parts of other ranks' shards into `buffer`, a contiguous buffer of any dtype. One-sided.

        `base` is added to the index of each part's first element in the shard. The copies are complete after `flush`.
        """
        get, element, limit = self._win.Get, self._copied, self._max_get_numel
        for target, start, (numel, first) in parts:
            for offset in range(0, numel, limit):
                get([buffer, (min(limit, numel - offset), first + offset), element], target, base + start + offset)

    def start_get(self, buffer: np.ndarray, target: int, start: int) -> list[MPI.Request]:
        """Start copying elements of rank `target`'s shard, from `start` on, into a contiguous array. One-sided.

        The copy is complete when all of the returned requests are.
        """
        limit, element = self._max_get_numel, self._copied
        parts = ((offset, buffer[offset : offset + limit]) for offset in range(0, len(buffer), limit))
        return [self._win.Rget([part, len(part), element], target, start + offset) for offset, part in parts]

    def put_messages(self, values: Memory, parts: Iterable[Message]) -> None:
        """Start overwriting parts of other ranks' shards with parts of `values`, a contiguous buffer. One-sided.

        Do not modify `values` until `flush` has completed the operations.
        """
        put, element = self._win.Put, self._copied
        for target, start, span in parts:
            put([values, span, element], target, start)

    def accumulate_messages(self, values: Memory, parts: Iterable[Message], base: int = 0) -> None:
        """Start adding parts of `values` to parts of other ranks' shards. One-sided.

        `values` has the shards' dtype, one of `MPI_DTYPES`, and must not be modified before `flush_local`. `base`
        is added to the index of each part's first element in the shard.
        """
        assert self._summed is not None, "MPI cannot add this type"
        accumulate, element, operation = self._win.Accumulate, self._summed, MPI.SUM
        for target, start, span in parts:
            accumulate([values, span, element], target, base + start, operation)

    def fetch_and_add(self, target: int, offset: int, value: int) -> int:
        """Atomically add `value` to int64 element `offset` of `target`'s shard and return the old value. One-sided."""
        return self._fetch_and(MPI.SUM, target, offset, value)

    def atomic_read(self, target: int, offset: int) -> int:
        """Atomically read and return int64 element `offset` of rank `target`'s shard. One-sided."""
        return self._fetch_and(MPI.NO_OP, target, offset, 0)

    def atomic_store(self, target: int, offset: int, value: int) -> None:
        """Atomically set int64 element `offset` of rank `target`'s shard to `value`. One-sided."""
        self._fetch_and(MPI.REPLACE, target, offset, value)

    def compare_and_swap(self, target: int, offset: int, expected: int, value: int) -> int:
        """Atomically set an int64 element to `value` if it equals `expected`, and return the old value. One-sided."""
        operand, compared, before = (np.array([each], dtype=np.int64) for each in (value, expected, 0))
        self._win.Compare_and_swap(operand, compared, before, target, offset)
        self._win.Flush(target)
        return int(before[0])

    def atomic_read_all(self, target: int, count: int) -> np.ndarray:
        """Return the first `count` int64 elements of rank `target`'s shard, each read atomically. One-sided."""
        return self._exchange_all(MPI.NO_OP, target, np.zeros(count, dtype=np.int64))

    def atomic_store_all(self, target: int, values: np.ndarray) -> None:
        """Overwrite the first elements of rank `target`'s shard with int64 `values`, each atomically. One-sided."""
        self._exchange_all(MPI.REPLACE, target, values)

    def _exchange_all(self, operation: MPI.Op, target: int, values: np.ndarray) -> np.ndarray:
        assert self.tensor.dtype == torch.int64, "counters are int64"
        before, element = np.empty_like(values), MPI.INT64_T
        self._win.Get_accumulate([values, element], [before, element], target, (0, len(values), element), operation)
        self._win.Flush(target)
        return before

    def _fetch_and(self, operation: MPI.Op, target: int, offset: int, value: int) -> int:
        assert self.tensor.dtype == torch.int64, "counters are int64"
        operand, before = np.array([value], dtype=np.int64), np.empty(1, dtype=np.int64)
        self._win.Fetch_and_op([operand, MPI.INT64_T], [before, MPI.INT64_T], target, offset, operation)
        self._win.Flush(target)
        return int(before[0])

    def flush(self, target: int | None = None) -> None:
        """Complete this rank's operations at rank `target`, or at all ranks if `target` is None. One-sided."""
        if target is None:
            self._win.Flush_all()
        else:
            self._win.Flush(target)

    def flush_local(self) -> None:
        """Complete this rank's operations locally, so that the buffers passed to them may be modified. One-sided."""
        self._win.Flush_local_all()

    def sync(self) -> None:
        """Synchronize the public and private copies of the window (`MPI_Win_sync`). Does not communicate."""
        for win in self._wins:
            win.Sync()

    def free(self) -> None:
        """Free the window. Collective. Views of it keep a copy, or become invalid if `CAN_DETACH_STORAGE` is False."""
        views = (*self._mapped_shards.values(), *self._views)
        storages = [StorageWeakRef(view.untyped_storage()) for view in views]
        del views
        self.tensor = torch.empty(0)
        self._mapped_shards.clear()
        self._views.clear()
        for reference in storages:
            # Accessing freed memory would crash.
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None and CAN_DETACH_STORAGE:
                storage._swap_data_ptr_(storage.clone())  # type: ignore[attr-defined]
        for win in self._wins:
            win.Unlock_all()
            win.Free()

    def _make(self, world: World, numel: int, dtype: torch.dtype, info: MPI.Info) -> WindowParts:
        """Create the MPI windows. Collective."""
        win = MPI.Win.Allocate(numel * dtype.itemsize, dtype.itemsize, info, world.comm)
        tensor = torch.frombuffer(win.tomemory(), dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)
        return [win], {world.rank: tensor}

    def _open_epochs(self, world: World) -> None:
        models = {memory_model(win) for win in self._wins}
        for win in self._wins:
            if models == {"unified"}:
                win.Lock_all(MPI.MODE_NOCHECK)
            else:
                win.Free()
        if models != {"unified"}:
            raise UserError(
                f"expected windows of the unified memory model (MPI_WIN_UNIFIED), got {models.pop()} ones under "
                f"{world.mpi_library}: use another MPI library"
            )


class PrivateWindow(Window):
    """Window whose operations complete when their target calls MPI, whatever others do. Construction is collective.

    With other windows, Open MPI's operations on a rank of another node also wait for the first rank of that node.
    """

    @override
    def _make(self, world: World, numel: int, dtype: torch.dtype, info: MPI.Info) -> WindowParts:
        tensor = torch.empty(numel, dtype=dtype)
        return [MPI.Win.Create(tensor.numpy(), dtype.itemsize, info, world.comm)], {world.rank: tensor}


class SharedWindow(Window):
    """Window whose zero-filled shards, `[numel]` per rank, are mapped by all ranks on the same node.

    Construction is collective. `numel` must be the same on all ranks. The shards on a node are contiguous in memory, in
    the order of the ranks (MPI-4.1, 12.2.3).
    """

    @override
    def _make(self, world: World, numel: int, dtype: torch.dtype, info: MPI.Info) -> WindowParts:
        num_bytes = numel * dtype.itemsize
        wins = [MPI.Win.Allocate_shared(num_bytes, dtype.itemsize, MPI.INFO_NULL, world.node_comm)]
        shards = [wins[0].Shared_query(local_rank)[0] for local_rank in range(world.local_size)]
        if world.num_nodes > 1:
            wins.insert(0, MPI.Win.Create(shards[world.local_rank], dtype.itemsize, MPI.INFO_NULL, world.comm))
        self._node_memory = MPI.memory.fromaddress(shards[0].address, num_bytes * world.local_size)
        tensors = [torch.frombuffer(shard, dtype=dtype, count=numel) for shard in shards]
        return wins, dict(zip(world.node_ranks, tensors, strict=True))

    @property
    @override
    def mapped_memory(self) -> torch.Tensor:
        return torch.frombuffer(self._node_memory, dtype=torch.uint8)

    def node_view(self, start: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return a view of the memory of all shards on the node, `[numel]` of `dtype`, beginning at byte `start`.

        Each view has its own storage. If `CAN_DETACH_STORAGE` is True, a view that is still referenced when the window
        is freed keeps a copy of its elements.
        """
        view = torch.frombuffer(self._node_memory, dtype=dtype, count=numel, offset=start)
        self._views.append(view)
        return view


def as_mpi_buffer(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous float32, float64, int64 or uint8 tensor `[n]` as a buffer for MPI.

    Only MPI may access device memory; reading it from Python would crash. The buffer does not keep the tensor alive.
    """
    assert tensor.dim() == 1 and tensor.is_contiguous()
    view = memoryview(MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes))  # type: ignore[arg-type]
    return view.cast(_TYPE_CODES[tensor.dtype])


def align_up(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """Round a number of bytes up to a multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment


def deferred_flush(
    world: World, flush: Callable[[], None], what: str, owners: Iterable[int], memory: torch.Tensor
) -> Work:
    """Return a handle for operations in flight on `memory`. Its `wait` method completes them by calling `flush`.

    The handle references `memory` until then, because MPI does not. `what` and `owners` are for error messages.
    """

    def complete(_memory: torch.Tensor) -> None:
        with world.deadline(what, owners):
            flush()

    return Work(partial(complete, memory))


def messages(target: int, start: int, numel: int, first: int = 0) -> Iterator[Message]:
    """Yield messages for `numel` elements, beginning at `start` in the shard and at `first` in the buffer."""
    for offset in range(0, numel, MAX_MESSAGE_NUMEL):
        yield target, start + offset, (min(MAX_MESSAGE_NUMEL, numel - offset), first + offset)

"""Communication interface of a sharded model.

    Group            the ranks and their synchronization points (`comm.group`)
    ParameterStore   this rank's shard of every flat array (`comm.layout`); fetches and releases full arrays
    GradientStore    this rank's gradient shard of every trainable array; pushes gradients to the owners of the elements

A `Transport` combines a group, a parameter store and a gradient store. Between minibatches, it runs up to three
synchronization points:

    A  complete_gradients   all pushes have completed at their targets; owners may read their gradient shards
    N  group.norm           only if gradients are clipped by their norm
    B  publish_parameters   all parameter shards are written, all gradient shards zero; fetches and pushes may start

Within a minibatch, ranks communicate only through fetches and pushes. `comm.factory` builds these transports:

    transport    shards are in             model is on   a fetch returns          is_local   threads
    window       windows on the host       host          see below                one rank   yes
    staged       windows on the host       device        a copy in a buffer       no         yes
    device       windows on the device     device        a copy in a buffer       no         yes
    single_rank  memory of the device      device        a view of the shard      yes        no

With zero-copy on one node, a fetch from the `window` transport returns a view of the node's windows. With a node cache
(`comm.windows.node_cache`), it returns a view of memory that the node's ranks share, into which the first of them that
needs an array copies it. Otherwise, it returns a copy in a buffer. Threads require MPI_THREAD_MULTIPLE. With islands
(`comm.islands`), ranks fetch from and push to their own island only, and an `IslandExchange` connects the islands.

A `ShardStorage` owns the memory of the shards. One class is often both a store and a storage.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from odc_mpi.comm.buffers import BufferPool, empty_host
from odc_mpi.comm.group import Group
from odc_mpi.comm.layout import FlatLayout
from odc_mpi.comm.traffic import Traffic
from odc_mpi.comm.work import FetchWork, Work

if TYPE_CHECKING:
    from odc_mpi.comm.islands.exchange import IslandExchange
    from odc_mpi.comm.windows.node_cache import NodeCache

#: Dtypes of parameters. Parameters are transferred as bytes, so MPI need not support their dtype.
PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: Dtypes of gradients. MPI must be able to sum them at the target, which rules out bf16. int64 holds fixed-point
#: numbers (`shard.fixed_point`), which a transport adds as integers.
REDUCE_DTYPES = (torch.float32, torch.float64, torch.int64)


class ParameterStore(ABC):
    """Store that holds this rank's parameter shards and fetches full arrays from the shards of all ranks.

    Args:
        dtype: Default dtype of parameters in shards and transfers. A layout with a `dtype` overrides it.
        buffers: Buffer pool for fetched arrays. The default is a pool in host memory.
    """

    #: True if a fetch may transfer data, False if it only returns a view of the owners' memory. Valid after allocation.
    transfers: bool = True
    #: True if a fetched array stays valid until the parameters are published, in memory that is never used for another
    #: array, so that autograd may save it. Valid after allocation.
    stays_valid: bool = False

    def __init__(self, dtype: torch.dtype, buffers: BufferPool | None = None) -> None:
        self.dtype = dtype
        self.buffers = buffers or BufferPool()

    @property
    @abstractmethod
    def layouts(self) -> Sequence[FlatLayout]:
        """Layouts of all arrays. The `index` of an array is its position in this sequence."""

    def dtype_of(self, index: int) -> torch.dtype:
        """Return the dtype of array `index`."""
        return self.layouts[index].dtype or self.dtype

    def uses_buffer(self, index: int) -> bool:
        """Return True if the fetched array occupies a buffer of this rank, which is reused after the release."""
        return self.transfers and not self.stays_valid

    @property
    def enqueues_only(self) -> bool:
        """True if `start_fetch` only enqueues device copies and thus needs no thread. Valid after allocation."""
        return False

    @abstractmethod
    def shard(self, index: int) -> torch.Tensor:
        """Return this rank's shard of array `index`, `[shard_numel]` of `dtype_of(index)`.

        The tensor is not a copy: other ranks read from the same memory.
        """

    @abstractmethod
    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        """Start fetching the full array `index` into `buffer`, which `acquire_buffer` has returned. One-sided.

        Do not access `buffer` until the returned handle's `wait` has returned. On a GPU, copies that are still in
        flight at that point are complete after `Transport.complete_gradients`.
        """

    def record_event(self, buffer: torch.Tensor) -> None:  # noqa: B027 - host memory needs no event
        """On a GPU, record an event on the current stream. The next `start_fetch` into `buffer` waits for it.

        Call this method on the computing thread after enqueuing all kernels that use `buffer`. Does nothing by default.
        """

    def acquire_buffer(self, index: int) -> torch.Tensor:
        """Return memory for `start_fetch`, `[numel]` of `dtype_of(index)`. Call this method on the computing thread.

        This is a buffer with its event recorded, or a view that will contain the array if `uses_buffer` is False.
        """
        buffer = self.buffers.acquire(self.layouts[index].numel, self.dtype_of(index))
        self.record_event(buffer)
        return buffer

    def fetch(self, index: int) -> FetchWork:
        """Start fetching the full array `index`. One-sided. The handle's `wait` method returns the array."""
        buffer = self.acquire_buffer(index)
        return FetchWork(buffer, self.start_fetch(index, buffer))

    def release(self, fetched: torch.Tensor) -> None:
        """Release a fetched array. Its buffer, if it has one, is reused once no other tensor shares its memory."""
        self.buffers.release(fetched)

    @property
    def shard_bytes(self) -> int:
        """Total size of this rank's shards, in bytes."""
        return sum(layout.shard_numel * (layout.dtype or self.dtype).itemsize for layout in self.layouts)


class GradientStore(ABC):
    """Store that holds this rank's gradient shards and pushes gradients to the shards of all ranks."""

    #: True if this rank owns all elements and `shard` is on the model's device, so that gradients can be added there.
    is_local: bool = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @abstractmethod
    def shard(self, index: int) -> torch.Tensor:
        """Return this rank's gradient shard of trainable array `index`, `[shard_numel]` of `dtype`, without copying."""

    @abstractmethod
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        """Start adding a gradient to the shards of the ranks that own its elements. One-sided.

        Args:
            index: Index of a trainable array.
            gradient: Contiguous gradient, `[n]` of `dtype`, of the elements starting at `start`. Call
                `prepare_push(gradient)` first. Do not modify `gradient` until the returned handle's `wait` has
                returned. Call `wait` before `Transport.complete_gradients`: on a GPU, the push may not start
                earlier.
        """

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return an uninitialized uint8 buffer `[num_bytes]` for gradients on the model's device."""
        return empty_host(num_bytes)

    def prepare_push(self, gradient: torch.Tensor) -> None:  # noqa: B027 - host memory needs no preparation
        """Prepare for the next `push` of `gradient`, which kernels may still be computing on a GPU.

        Call this method on the computing thread after enqueuing these kernels. Does nothing by default.
        """


class ShardStorage:
    """Base class for owners of the memory of parameter or gradient shards.

    A `Transport` calls `plan` and `allocate` once, and `free` at the end. It calls `flush` before and
    `complete` after `Group.gradients_complete`, `publish` before `Group.parameters_published`, and `sync` before and
    after the latter. By default, `plan` records the layouts and returns 0; the other methods do nothing.
    """

    layouts: Sequence[FlatLayout] = ()
    #: Counter for the bytes that this storage moves. By default, it moves none, or leaves this to another storage.
    traffic: Traffic = Traffic()

    def plan(self, layouts: Sequence[FlatLayout]) -> int:
        """Record the layouts, and return the size in bytes of the shared host memory that `allocate` needs.

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
        """Return the host memory that a device can copy from once the memory is pinned. Empty by default."""
        return []

    def free(self) -> None:
        """Free the memory. Collective. Call this within `World.collective`, and do not access the shards afterwards."""


@dataclass(eq=False, repr=False)
class Transport:
    """A group, a parameter store and a gradient store, with the synchronization points.

    Construction raises ValueError unless the store dtypes are in `PARAMETER_DTYPES` and `REDUCE_DTYPES`, respectively.

    Attributes:
        storages: Storages of the shards, in the order in which they are allocated. They are freed in reverse order.
        node_cache: Parameter cache shared by the node's ranks, also one of the `storages`. None without a cache.
        exchange: Exchange between islands, which is also one of the `storages`. None without islands.
        frozen_owners: Ranks of this node, if its frozen arrays are divided among them. None if among all ranks.
        device: Device of the model, the fetched arrays and the pushed gradients.
        thread_safe: True if threads may fetch while one thread pushes, False if only the computing thread may do so.
    """

    group: Group
    parameters: ParameterStore
    gradients: GradientStore
    storages: Sequence[ShardStorage]
    _: KW_ONLY
    node_cache: "NodeCache | None" = None
    exchange: "IslandExchange | None" = None
    frozen_owners: tuple[int, ...] | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    thread_safe: bool = True
    _is_open: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if (dtype := self.parameters.dtype) not in PARAMETER_DTYPES:
            raise ValueError(f"param_dtype must be one of {PARAMETER_DTYPES}, got {dtype}")
        if (dtype := self.gradients.dtype) not in REDUCE_DTYPES:
            raise ValueError(f"reduce_dtype must be one of {REDUCE_DTYPES} (what MPI can add), got {dtype}")

    def allocate(self, layouts: Sequence[FlatLayout], close: Callable[[], None] | None = None) -> None:
        """Allocate zero-filled shards for arrays with the given layouts. Collective. Call this method only once.

        `close` is called if the `World` closes before this transport does, and must call the transport's `close`.
        Raises `AllRanksUserError` on every rank if any node has too little memory or any `plan` raises `UserError`.
        """
        assert not self.parameters.layouts, "a transport allocates once"
        island_layouts = [layout.island_layout for layout in layouts]
        self.group.reserve(lambda: sum(storage.plan(island_layouts) for storage in self.storages))
        for storage in self.storages:
            storage.allocate()
        # No rank may push into memory that its owner has not zeroed yet.
        self._sync()
        self.group.open(close or self.close)
        self._sync()
        self._is_open = True

    @property
    def node_cache_bytes(self) -> int:
        """Size in bytes of this rank's share of the memory in which its node caches fetched arrays; 0 without it."""
        return self.node_cache.rank_bytes if self.node_cache else 0

    @property
    def island_wait_s(self) -> float:
        """Total time that this rank has waited for other islands at synchronization points, in seconds."""
        return self.exchange.wait_s if self.exchange else 0.0

    @property
    def bytes_between_islands(self) -> int:
        """Bytes of gradients sent to, and parameters received from, other islands per minibatch; 0 without islands."""
        return int(self.exchange.bytes_per_minibatch.sum()) if self.exchange else 0

    @property
    def finish_arrays(self) -> "Callable[[Iterable[int]], Work] | None":
        """Function by which a rank announces that it will push no more gradients of arrays in this minibatch.

        See `IslandExchange.finish`. None without islands, where nothing depends on it.
        """
        return self.exchange.finish if self.exchange else None

    def parameter_shard(self, index: int) -> torch.Tensor:
        """Return the parameters of array `index` that this rank updates, `[shard_numel]`, without copying them."""
        return self.exchange.parameter_shard(index) if self.exchange else self.parameters.shard(index)

    def gradient_shard(self, index: int) -> torch.Tensor:
        """Return the gradients of `parameter_shard(index)`, which are summed over all ranks once they are complete."""
        return self.exchange.gradient_shard(index) if self.exchange else self.gradients.shard(index)

    @property
    def gradient_shard_bytes(self) -> int:
        """Total size of this rank's gradient shards, in bytes."""
        numel = sum(layout.shard_numel for layout in self.parameters.layouts if layout.trainable)
        numel += numel // self.group.num_islands if self.exchange else 0
        return numel * self.gradients.dtype.itemsize

    def take_traffic(self) -> list[int]:
        """Return the bytes fetched, then those pushed, by `LOCATIONS`, since the last call. Call once per minibatch.

        All fetches and pushes must be complete.
        """
        counts: np.ndarray = np.sum([storage.traffic.take().ravel() for storage in self.storages], axis=0)
        return counts.tolist()

    def complete_gradients(self, report: np.ndarray) -> np.ndarray:
        """Complete all pushes, and gather the reports of all ranks (see `Group.gradients_complete`). Collective."""
        self.group.world.set_status("flushing gradients")
        for storage in self.storages:
            storage.flush()
        reports = self.group.gradients_complete(report)  # A
        for storage in self.storages:
            storage.complete()
        return reports

    def publish_parameters(self) -> None:
        """Make the parameters that each rank has written to its shards visible to all ranks. Collective."""
        for storage in self.storages:
            storage.publish()
        self._sync()
        self.group.parameters_published()  # B
        self._sync()

    def close(self) -> None:
        """Free the shards. Collective. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self.group.free(self.storages)
        self.parameters.buffers.clear()

    def _sync(self) -> None:
        for storage in self.storages:
            storage.sync()

"""Communication interface of a sharded model.

    Group            the ranks, their collectives, and the status that each rank publishes for time-out messages
    ParameterStore   this rank's shard of every flat array (`comm.layout`); fetches and releases full arrays
    GradientStore    this rank's shard of every trainable array; pushes gradients to the owners of the elements

A `Transport` combines a group, a parameter store and a gradient store. It runs the synchronization points between two
minibatches:

    A  complete_gradients   all pushes have completed at their targets; owners may read their gradient shards
    N  group.norm           only if gradients are clipped by their norm
    B  publish_parameters   all parameter shards are written, all gradient shards zero; fetches and pushes may start

Within a minibatch, ranks communicate only by fetches and pushes. `comm.factory` builds these transports:

    transport    shards are in             model is on   access         pushes_to_peers   threads   one_sided
    window       windows on the host       host          any            yes               yes       yes
    staged       windows on the host       device        COPY           yes               yes       yes
    device       windows on the device     device        COPY           yes               yes       yes
    single_rank  memory of the device      device        KEEP           no                no        yes
    collective   private memory            host          COPY           yes               no        no

The transport `window` has VIEW access, or KEEP if torch allows it, when zero-copy is on and all ranks are on one node.
On several nodes, ranks that share a cache with other ranks of their node (`comm.windows.node_cache`) have NODE access.
Otherwise it has COPY access. Threads require MPI_THREAD_MULTIPLE.

A `comm.shard_storage.ShardStorage` owns the memory of the shards. Often one class is both store and storage. A store
can wrap another store, as in `comm.device.staged`; the storage of the inner store is then used.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum

import numpy as np
import torch

from odc_mpi.comm.buffers import BufferPool, empty_host
from odc_mpi.comm.layout import FlatLayout
from odc_mpi.comm.shard_storage import ShardStorage
from odc_mpi.comm.work import FetchWork, Work

#: Dtypes of parameters. Parameters are transferred as bytes, so MPI need not support their dtype.
PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: Dtypes of gradients: those that MPI can sum at the target, which excludes bf16. int64 represents fixed-point numbers
#: (`shard.gradient_format.fixed_point`), which a transport adds as integers.
REDUCE_DTYPES = (torch.float32, torch.float64, torch.int64)


class Access(Enum):
    """Kinds of memory in which a fetch returns an array. The value of each member describes it."""

    COPY = "copies into a buffer, which is reused after the release"
    VIEW = "a view of mapped memory, which is unmapped when the transport closes, even if tensors reference it"
    KEEP = "a view that is valid until parameters are published, of memory for this array only, so autograd may save it"
    NODE = "as KEEP, but of memory that the node shares, into which its first rank that needs the array fetches it"

    @property
    def transfers(self) -> bool:
        """True if a fetch may transfer data. If False, a fetch only returns a view."""
        return self in (Access.COPY, Access.NODE)


class Group(ABC):
    """Ranks among which the parameters are sharded, and their collective operations."""

    rank: int
    size: int
    #: Number of collectives so far: synchronization points, and fetches and pushes that are collective.
    num_collectives: int = 0

    #: Number of islands (`comm.islands`); 1 without islands.
    num_islands: int = 1

    @property
    def island(self) -> "Group":
        """Group of the ranks of this island, from and to which ranks fetch and push; `self` without islands."""
        return self

    def is_on_this_node(self, rank: int) -> bool:
        """Return True if `rank` is on the same node as this rank."""
        return True

    @abstractmethod
    def require_same(self, value: str, what: str) -> None:
        """Raise `AllRanksUserError` on all ranks if `value`, described by `what`, differs between ranks. Collective."""

    @abstractmethod
    def reserve(self, plan: Callable[[], int]) -> None:
        """Call `plan` on every rank, and check that each node has enough shared memory for its ranks. Collective.

        `plan` returns the number of bytes that this rank needs. Raises `AllRanksUserError` on every rank if the check
        fails or `plan` raises `UserError` or `OSError` on any rank.
        """

    @abstractmethod
    def open(self, close: Callable[[], None]) -> None:
        """Start the progress thread, if the group uses one, and synchronize all ranks. Collective.

        `close` is called when the `World` closes, unless `free` was called before.
        """

    @abstractmethod
    def gradients_complete(self, report: np.ndarray) -> np.ndarray:
        """Gather the `report` of each rank, `[k]` float64, and return the reports as `[size, k]`. Collective."""

    @abstractmethod
    def norm(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of `values`, `[k]` float64, over all ranks, bitwise identical on all ranks. Collective."""

    @abstractmethod
    def parameters_published(self) -> None:
        """Wait until all ranks have published their parameters. Collective."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite `tensor`, a contiguous CPU tensor, with the tensor of rank 0. Collective."""

    @abstractmethod
    def set_status(self, what: str, microbatch: int = 0) -> None:
        """Publish this rank's activity, which other ranks print if they wait too long. See `World.set_status`."""

    @abstractmethod
    def free(self, storages: Sequence["ShardStorage"]) -> None:
        """Synchronize all ranks, stop the progress thread, and free the storages in reverse order. Collective."""


class ParameterStore(ABC):
    """Parameter shards of this rank, and fetches of full arrays, which combine the shards of all ranks.

    Args:
        dtype: Default dtype of parameters in shards and transfers. The `dtype` of a layout takes precedence.
        buffers: Pool of buffers for fetched arrays. By default, they are in host memory.
    """

    #: Kind of memory in which a fetch returns an array.
    access: Access = Access.COPY

    def __init__(self, dtype: torch.dtype, buffers: BufferPool | None = None) -> None:
        self.dtype = dtype
        self.buffers = buffers or BufferPool()

    @property
    @abstractmethod
    def layouts(self) -> Sequence[FlatLayout]:
        """Layouts of all arrays. The `index` of an array is its position in this sequence."""

    def dtype_of(self, index: int) -> torch.dtype:
        """Return the dtype of the array with index `index`."""
        return self.layouts[index].dtype or self.dtype

    @abstractmethod
    def shard(self, index: int) -> torch.Tensor:
        """Return this rank's shard of array `index`, `[shard_numel]` of `dtype_of(index)`.

        The tensor is not a copy: other ranks read the same memory.
        """

    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        """Start fetching the full array `index` into `buffer`, `[numel]` of `dtype_of(index)`. One-sided.

        Valid only if `access.transfers` is True. Call `record_event(buffer)` first, and do not access `buffer` until
        `wait` of the returned handle has returned.
        """
        raise NotImplementedError(f"{type(self).__name__} fetches without copies")

    def record_event(self, buffer: torch.Tensor) -> None:  # noqa: B027 - host memory needs no event
        """Record an event on the current stream. The next `start_fetch` into `buffer` waits for the event.

        Call this method on the computing thread, after all kernels that use `buffer` were enqueued. `start_fetch` may
        then run on another thread.
        """

    def acquire_buffer(self, index: int) -> torch.Tensor:
        """Return a buffer for `start_fetch`, and record its event. Call this method on the computing thread."""
        buffer = self.buffers.acquire(self.layouts[index].numel, self.dtype_of(index))
        self.record_event(buffer)
        return buffer

    def fetch(self, index: int) -> FetchWork:
        """Start fetching the full array `index`. One-sided. The handle's method `wait` returns the array."""
        buffer = self.acquire_buffer(index)
        return FetchWork(buffer, self.start_fetch(index, buffer))

    def release(self, fetched: torch.Tensor) -> None:
        """Release a fetched array. A buffer that the fetch filled is reused when no other tensor shares its memory."""
        self.buffers.release(fetched)

    @property
    def node_cache_bytes(self) -> int:
        """Size of this rank's share of the memory in which its node caches parameters, in bytes. 0 without a cache."""
        return 0

    def take_shared_fetches(self) -> list[int]:
        """Return the array index of each fetch that another rank of the node made for this one since the last call."""
        return []

    @property
    def shard_bytes(self) -> int:
        """Total size of the shards of this rank, in bytes."""
        return sum(layout.shard_numel * (layout.dtype or self.dtype).itemsize for layout in self.layouts)


class GradientStore(ABC):
    """Gradient shards of this rank, and pushes, which add gradients to the shards of all ranks."""

    #: False if a push only adds locally (one rank on a GPU). Accumulating gradients before such a push saves nothing.
    pushes_to_peers: bool = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @abstractmethod
    def shard(self, index: int) -> torch.Tensor:
        """Return this rank's gradient shard of the trainable array `index`, `[shard_numel]` of `dtype`. Not a copy."""

    @abstractmethod
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        """Start adding a gradient to the shards of the ranks that own its elements. One-sided.

        Args:
            index: Index of a trainable array.
            gradient: Gradient of `n` consecutive elements of the array, `[n]` of `dtype`, contiguous. Call
                `record_event(gradient)` first. Do not modify it until `wait` of the returned handle has returned.
            start: Index in the array of the first of the `n` elements.
        """

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return an uninitialized buffer for gradients, `[num_bytes]` uint8, on the device of the model."""
        return empty_host(num_bytes)

    def record_event(self, gradient: torch.Tensor) -> None:  # noqa: B027 - host memory needs no event
        """Record an event on the current stream. The next `push` of `gradient` waits for the event.

        Call this method on the computing thread, after the kernels that compute `gradient` were enqueued.
        """


class Exchange(ShardStorage, ABC):
    """Exchange of gradients and parameters between islands, each of which stores copies of all arrays.

    A rank is the owner of a part of its shard: it updates this part on behalf of all islands.
    """

    @abstractmethod
    def parameter_shard(self, index: int) -> torch.Tensor:
        """Return the parameters of an array that this rank owns, without a copy."""

    @abstractmethod
    def gradient_shard(self, index: int) -> torch.Tensor:
        """Return the gradients of the same elements, summed over all islands, without a copy."""

    @abstractmethod
    def finish(self, indices: Iterable[int]) -> Work:
        """Announce that this rank pushes no more gradients of some arrays in this minibatch. One-sided.

        Arrays that all ranks of the island have finished are pushed to their owners. The flush finishes the others.
        """

    @abstractmethod
    def bytes_per_minibatch(self) -> tuple[Counter[int], Counter[int]]:
        """Return the bytes that this rank receives from and pushes to other islands in a minibatch, by rank."""


@dataclass(eq=False, repr=False)
class Transport:
    """A group, a parameter store and a gradient store, with the synchronization points between minibatches.

    Construction raises ValueError if the dtype of the parameters is not in `PARAMETER_DTYPES`, or the dtype of the
    gradients is not in `REDUCE_DTYPES`.

    Attributes:
        storages: Storages of the shards, in the order of allocation. They are freed in reverse order.
        exchange: Exchange between islands, the last of the storages; None without islands.
        device: Device of the model, of fetched arrays and of pushed gradients.
        thread_safe: True if several threads may call the stores concurrently. If False, only the computing thread may.
        one_sided: True if a fetch or push completes without calls by other ranks. If False, each fetch and push is
            collective: all ranks must make the same fetches and pushes in the same order, so no rank may skip a fetch.
    """

    group: Group
    parameters: ParameterStore
    gradients: GradientStore
    storages: Sequence[ShardStorage]
    _: KW_ONLY
    exchange: Exchange | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    thread_safe: bool = True
    one_sided: bool = True
    _is_open: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if (dtype := self.parameters.dtype) not in PARAMETER_DTYPES:
            raise ValueError(f"param_dtype must be one of {PARAMETER_DTYPES}, got {dtype}")
        if (dtype := self.gradients.dtype) not in REDUCE_DTYPES:
            raise ValueError(f"reduce_dtype must be one of {REDUCE_DTYPES} (what MPI can add), got {dtype}")

    def allocate(self, layouts: Sequence[FlatLayout], close: Callable[[], None] | None = None) -> None:
        """Allocate zero-filled shards for arrays with the given layouts. Collective. Call this method only once.

        `close` is called if the `World` closes before this transport does. It must call the transport's method `close`,
        which is also the default. Raises `AllRanksUserError` on every rank if any node has too little shared memory.
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

    def parameter_shard(self, index: int) -> torch.Tensor:
        """Return the parameters of an array that this rank updates, in the memory that other ranks read."""
        return self.exchange.parameter_shard(index) if self.exchange else self.parameters.shard(index)

    def gradient_shard(self, index: int) -> torch.Tensor:
        """Return the gradients of the elements of `parameter_shard`, summed over all ranks, when they are complete."""
        return self.exchange.gradient_shard(index) if self.exchange else self.gradients.shard(index)

    @property
    def gradient_shard_bytes(self) -> int:
        """Total size of the gradient shards of this rank, in bytes."""
        numel = sum(layout.shard_numel for layout in self.parameters.layouts if layout.trainable)
        numel += numel // self.group.num_islands if self.exchange else 0
        return numel * self.gradients.dtype.itemsize

    def complete_gradients(self, report: np.ndarray) -> np.ndarray:
        """Complete the pushes of all ranks, and return all reports, each `[k]` float64, as `[size, k]`. Collective."""
        self.group.set_status("flushing gradients")
        for storage in self.storages:
            storage.flush()
        reports = self.group.gradients_complete(report)  # A
        for storage in self.storages:
            storage.complete()
        return reports

    def publish_parameters(self) -> None:
        """Make the values that each rank has written into its parameter shards visible to all ranks. Collective."""
        for storage in self.storages:
            storage.publish()
        self._sync()
        self.group.parameters_published()  # B
        self._sync()

    def close(self) -> None:
        """Free the shards. Collective. Further calls do nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self.group.free(self.storages)
        self.parameters.buffers.clear()

    def _sync(self) -> None:
        for storage in self.storages:
            storage.sync()

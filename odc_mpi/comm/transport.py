"""Communication interface of a sharded model.

    Group            the ranks, their collectives, and the status that they publish for time-out messages
    ParameterStore   this rank's shard of every flat array (`shard.layout.FlatLayout`); fetches and releases full arrays
    GradientStore    this rank's shard of every trainable array; pushes gradients to the owners

A `Transport` combines one of each and runs the synchronization points between two minibatches:

    A  complete_gradients   all pushes have completed at their targets; owners may read their gradient shards
    N  group.norm           only if gradients are clipped by their norm
    B  publish_parameters   all parameter shards are written, all gradient shards zero; fetches and pushes may start

Within a minibatch, ranks communicate only by fetches and pushes, in which the owner takes no part. The transports that
`comm.factory` builds:

    transport    shards are in             model is on   access         pushes_to_peers   threads   one_sided
    window       windows on the host       host          any            yes               yes       yes
    staged       windows on the host       device        COPY           yes               yes       yes
    device       windows on the device     device        COPY           yes               yes       yes
    single_rank  memory of the device      device        KEEP           no                no        yes
    collective   private memory            host          COPY           yes               no        no

With windows on the host, zero-copy and all ranks on one node, `access` is VIEW, or KEEP if torch allows it; else COPY.
`threads` requires MPI_THREAD_MULTIPLE.

A `comm.shard_storage.ShardStorage` owns the memory of the shards; often a store is its own storage. A store can wrap
another store, as in `comm.device.staged`, and leave the storage of the inner store unchanged.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum

import numpy as np
import torch

from odc_mpi.comm.buffers import BufferPool, empty_host
from odc_mpi.comm.shard_storage import Footprint, Layout, ShardStorage
from odc_mpi.comm.work import FetchWork, Work

#: Parameters are transferred as bytes, so every floating-point type is possible.
PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: Types that MPI can sum at the target; it has no bf16. Integers are fixed-point numbers
#: (`shard.gradient_format.fixed_point`), which a transport adds as integers.
REDUCE_DTYPES = (torch.float32, torch.float64, torch.int64)


class Access(Enum):
    """Kind of access that a fetch gives to an array."""

    COPY = "copies into a buffer, which is reused after the release"
    VIEW = "a view of mapped memory, which is unmapped when the transport closes, even if tensors reference it"
    KEEP = (
        "a view that is valid until parameters are published, of memory that is never reused, so autograd may save it"
    )


class Group(ABC):
    """The ranks that share the arrays."""

    rank: int
    size: int
    #: Number of collectives so far: at the synchronization points, and collective fetches and pushes.
    num_collectives: int = 0

    def on_this_node(self, rank: int) -> bool:
        """Return True if a rank is on the node of this rank."""
        return True

    @abstractmethod
    def reserve(self, num_arrays: int, plan: Callable[[], Footprint]) -> None:
        """Call `plan` on every rank; raise on all ranks if it raises or plans too much on one. Collective."""

    @abstractmethod
    def open(self, close: Callable[[], None]) -> None:
        """Start the progress thread, if any; synchronize; and call `close` when the world closes. Collective."""

    @abstractmethod
    def gradients_complete(self, report: np.ndarray) -> np.ndarray:
        """Gather the reports of all ranks, float64, `[k]` to `[size, k]`. Collective."""

    @abstractmethod
    def norm(self, values: np.ndarray) -> np.ndarray:
        """Sum values over all ranks, `[k]` float64, bitwise identical on all ranks. Collective."""

    @abstractmethod
    def parameters_published(self) -> None:
        """Synchronize all ranks after they published their parameters. Collective."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a contiguous tensor with that of rank 0. Collective."""

    @abstractmethod
    def set_status(self, what: str, microbatch: int = 0) -> None:
        """Publish the activity of this rank, as `World.set_status`."""

    @abstractmethod
    def free(self, storages: Sequence["ShardStorage"]) -> None:
        """Stop the progress thread, synchronize, and free the storages, the last one first. Collective."""


class ParameterStore(ABC):
    """Parameter shards of this rank, and fetches of full arrays from the shards of all ranks.

    Args:
        dtype: Type of the parameters in the shards and in transfers, unless a layout has its own.
        buffers: Pool of the buffers of fetched arrays. Its peak is that of the parameter memory beyond the shards.
    """

    #: How a fetch gives access to an array.
    access: Access = Access.COPY

    def __init__(self, dtype: torch.dtype, buffers: BufferPool | None = None) -> None:
        self.dtype = dtype
        self.buffers = buffers or BufferPool()

    @property
    @abstractmethod
    def layouts(self) -> Sequence[Layout]:
        """Layouts of the arrays, in the order of their indices."""

    def dtype_of(self, index: int) -> torch.dtype:
        """Return the type of the elements of an array."""
        return self.layouts[index].dtype or self.dtype

    @abstractmethod
    def shard(self, index: int) -> torch.Tensor:
        """Return the shard of this rank, `[shard_numel]` of `dtype_of(index)`: the memory that other ranks read."""

    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        """Start to fetch a full array into a buffer, `[numel]` of `dtype_of(index)`. One-sided.

        Only for stores with `Access.COPY`. Call `record_event(buffer)` first. Do not access the buffer before the
        returned handle is complete.
        """
        raise NotImplementedError(f"{type(self).__name__} fetches without copies")

    def record_event(self, buffer: torch.Tensor) -> None:  # noqa: B027 - host memory needs no event
        """Record an event on the current stream, for which the next `start_fetch` into `buffer` waits.

        Call it from the computing thread after all kernels that use `buffer` were enqueued. `start_fetch` may then run
        on another thread.
        """

    def acquire_buffer(self, index: int) -> torch.Tensor:
        """Return a buffer for `start_fetch`, with an event recorded. For the computing thread."""
        buffer = self.buffers.acquire(self.layouts[index].numel, self.dtype_of(index))
        self.record_event(buffer)
        return buffer

    def fetch(self, index: int) -> FetchWork:
        """Start to fetch a full array. One-sided."""
        buffer = self.acquire_buffer(index)
        return FetchWork(buffer, self.start_fetch(index, buffer))

    def release(self, fetched: torch.Tensor) -> None:
        """Release a fetched array. Tensors that share its storage keep the memory allocated."""
        self.buffers.release(fetched)

    @property
    def shard_bytes(self) -> int:
        """Bytes of the shards of this rank."""
        return sum(layout.shard_numel * (layout.dtype or self.dtype).itemsize for layout in self.layouts)


class GradientStore(ABC):
    """Gradient shards of this rank, and pushes into the shards of all ranks, both with gradients of type `dtype`."""

    #: False for a single rank: a push is then a local addition, and accumulating gradients before it saves nothing.
    pushes_to_peers: bool = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @abstractmethod
    def shard(self, index: int) -> torch.Tensor:
        """Return the shard of this rank of a trainable array, `[shard_numel]` of `dtype`."""

    @abstractmethod
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        """Start to add a gradient to the shards of its owners. One-sided.

        Args:
            index: Index of a trainable array.
            gradient: `[n]` of `dtype`, contiguous. Call `record_event(gradient)` first. Do not modify it before the
                returned handle is complete.
            start: Offset of `gradient[0]` in the array, in elements.
        """

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return an uninitialized buffer for gradients on the device of the model, `[num_bytes]` uint8."""
        return empty_host(num_bytes)

    def record_event(self, gradient: torch.Tensor) -> None:  # noqa: B027 - host memory needs no event
        """Record an event on the current stream, for which the next `push` of `gradient` waits.

        Call it from the computing thread after the kernels that compute `gradient` were enqueued.
        """


@dataclass(eq=False, repr=False)
class Transport:
    """A group, a parameter store and a gradient store, with their synchronization points.

    Construction raises ValueError if MPI cannot transfer the type of the parameters, or sum that of the gradients.

    Attributes:
        storages: Memory of the shards, in the order of allocation. Freed in the reverse order.
        device: Device of the model, of fetched arrays and of pushed gradients.
        threads: True if several threads may call the stores concurrently. If False, only the computing thread may.
        one_sided: True if a fetch or push completes without the other ranks. If False, each is a collective: all ranks
            must issue the same ones in the same order, so the units to fetch must not depend on cached units.
    """

    group: Group
    parameters: ParameterStore
    gradients: GradientStore
    storages: Sequence[ShardStorage]
    _: KW_ONLY
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    threads: bool = True
    one_sided: bool = True
    _is_open: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if (dtype := self.parameters.dtype) not in PARAMETER_DTYPES:
            raise ValueError(f"param_dtype must be one of {PARAMETER_DTYPES}, got {dtype}")
        if (dtype := self.gradients.dtype) not in REDUCE_DTYPES:
            raise ValueError(f"reduce_dtype must be one of {REDUCE_DTYPES} (what MPI can add), got {dtype}")

    def allocate(self, layouts: Sequence[Layout], close: Callable[[], None] | None = None) -> None:
        """Allocate zero-filled shards of the arrays, which then are identified by their index. Collective; call once.

        If the world closes first, it calls `close`, which must call `self.close` (default: only that).
        """
        assert not self.parameters.layouts, "a transport allocates once"
        self.group.reserve(len(layouts), lambda: sum((storage.plan(layouts) for storage in self.storages), Footprint()))
        for storage in self.storages:
            storage.allocate()
        # No rank may push into memory that its owner has not zeroed yet.
        self._sync()
        self.group.open(close or self.close)
        self._sync()
        self._is_open = True

    def complete_gradients(self, report: np.ndarray) -> np.ndarray:
        """Complete all pushes of all ranks, and gather their reports, `[k]` float64 to `[size, k]`. Collective."""
        self.group.set_status("flushing gradients")
        for storage in self.storages:
            storage.flush()
        reports = self.group.gradients_complete(report)  # A
        for storage in self.storages:
            storage.complete()
        return reports

    def publish_parameters(self) -> None:
        """Make the stores of all owners into their shards visible to all ranks. Collective."""
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

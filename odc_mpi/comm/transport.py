"""The seam: all that a sharded model knows of communication, in three parts that vary apart.

    Group            which ranks there are, where they meet, what they tell each other
    ParameterStore   my shard of each flat array (`shard.layout.FlatLayout`); fetch a whole array; release it
    GradientStore    my shard of each trained array; push a gradient to its owners

A `Transport` holds one of each and leads them past the ordering points. Between two minibatches these are

    A  complete_gradients   all pushes have arrived; owners may read their gradient shards
    N  group.norm           only to clip by the norm
    B  publish_parameters   all parameter shards are written, all gradient shards cleared; fetches and pushes may begin

and within a minibatch there are only one-sided fetches and pushes, which need nothing of their owners.

The transports that `comm.factory` puts together:

    transport    shards are in             model is on   access         travels   threads   one_sided
    window       windows on the host       host          COPY or VIEW   yes       yes       yes
    staged       windows on the host       device        COPY           yes       yes       yes
    device       windows on the device     device        COPY           yes       yes       yes
    alone        memory of the device      device        KEEP           no        no        yes
    collective   private memory            host          COPY           yes       no        no

    access      how a fetch gives access to an array (`Access`). Of windows on the host: VIEW or KEEP with zero-copy
                where all ranks are on one node, else COPY
    travels     a push leaves this rank; if not, a sum at home is what it makes already
    threads     several threads may fetch and push at a time, if MPI grants MPI_THREAD_MULTIPLE
    one_sided   fetches and pushes need nothing of other ranks; if not, they are collective: the baseline of the
                benchmarks (`comm.collective`)

The memory that the shards lie in belongs to a `comm.shard_storage.ShardStorage`, often the store itself. A store that only changes the
way of the bytes, such as `comm.device.staged`, stands before another store and leaves that one's host as it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np
import torch

from odc_mpi.comm.buffers import BufferPool, empty_host
from odc_mpi.comm.shard_storage import Footprint, Layout, ShardStorage
from odc_mpi.comm.work import FetchWork, Work

#: What may travel as parameters: any floating-point type, as bytes.
PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: What may be summed at the target: MPI knows no bf16, and would add its bytes as integers. Integers are fixed-point
#: numbers (`shard.gradient_format.fixed_point`), of which a transport knows no more than how to add them.
REDUCE_DTYPES = (torch.float32, torch.float64, torch.int64)


class Access(Enum):
    """How a fetch gives access to an array."""

    COPY = "bytes move into a buffer, which is used again after the release"
    VIEW = "nothing moves: a view of memory that goes with the transport, whoever still looks at it"
    KEEP = "nothing moves: a view that stays valid until B and whose memory is never reused, so graphs may keep it"


class Group(ABC):
    """The ranks that share the arrays.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        num_collectives: Collective operations so far: at the ordering points, and fetches and pushes that are.
    """

    rank: int
    size: int
    num_collectives: int = 0

    def on_this_node(self, rank: int) -> bool:
        """Return whether a rank shares this one's node."""
        return True

    @abstractmethod
    def reserve(self, num_arrays: int, plan: Callable[[], Footprint]) -> None:
        """Call `plan` on every rank, and fail together where that raises or asks for too much. Collective."""

    @abstractmethod
    def open(self, close: Callable[[], None]) -> None:
        """Begin to serve other ranks, and meet a first time, when this one's hosts have their memory. Collective.

        Args:
            close: Called when the ranks part, if not before.
        """

    @abstractmethod
    def gradients_complete(self, report: np.ndarray) -> np.ndarray:
        """Meet at A: give every rank all reports, `[size, k]` float64 from `[k]` each. Collective."""

    @abstractmethod
    def norm(self, values: np.ndarray) -> np.ndarray:
        """Meet at N: sum `[k]` float64 over all ranks, to the last bit the same on each. Collective."""

    @abstractmethod
    def parameters_published(self) -> None:
        """Meet at B. Collective."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a contiguous tensor with rank 0's. Collective; for start-up."""

    @abstractmethod
    def set_status(self, what: str, microbatch: int = 0) -> None:
        """Tell the other ranks what this one is doing, should they wait for it in vain.

        Args:
            what: Such as "forward of unit layers.3".
            microbatch: Its number in this minibatch, from 1; 0 outside of microbatches.
        """

    @abstractmethod
    def free(self, storages: Sequence["ShardStorage"]) -> None:
        """Serve no more, meet a last time and free these hosts, the last one first. Collective."""


class ParameterStore(ABC):
    """This rank's shards of parameters, and whole arrays from those of all ranks.

    Args:
        dtype: Of parameters on the way and in the shards, unless a layout has a type of its own.
        buffers: Where fetches land.

    Attributes:
        buffers: Its peak tells the parameter memory beyond the shards.
    """

    #: How a fetch gives access to an array.
    access: Access = Access.COPY

    def __init__(self, dtype: torch.dtype, buffers: BufferPool | None = None) -> None:
        self.dtype = dtype
        self.buffers = buffers or BufferPool()

    @property
    @abstractmethod
    def layouts(self) -> Sequence[Layout]:
        """The arrays, once they are allocated."""

    def dtype_of(self, index: int) -> torch.dtype:
        """Return the type of an array's elements."""
        return self.layouts[index].dtype or self.dtype

    @abstractmethod
    def shard(self, index: int) -> torch.Tensor:
        """Return this rank's parameters, `[shard_numel]` of `dtype_of(index)`: the memory that others fetch."""

    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        """Start to fill `buffer`, `[numel]` of `dtype_of(index)`, which was handed over, with a whole array. One-sided.

        Only for stores whose fetches move bytes.
        """
        raise NotImplementedError(f"{type(self).__name__} fetches in place")

    def record_event(self, buffer: torch.Tensor) -> None:  # noqa: B027 - host memory is as it looks
        """Tell what the next fetch into a buffer comes after.

        To be called by the thread that computes, once it has given the device all that uses the buffer, and before
        `start_fetch`, which another thread may call.
        """

    def acquire_buffer(self, index: int) -> torch.Tensor:
        """Return a buffer to fetch an array into, handed over already. Local, by the thread that computes."""
        buffer = self.buffers.acquire(self.layouts[index].numel, self.dtype_of(index))
        self.record_event(buffer)
        return buffer

    def fetch(self, index: int) -> FetchWork:
        """Start to fetch a whole array. One-sided."""
        buffer = self.acquire_buffer(index)
        return FetchWork(buffer, self.start_fetch(index, buffer))

    def release(self, fetched: torch.Tensor) -> None:
        """Give back what a fetch returned. Tensors that still look at it keep the memory until they are gone."""
        self.buffers.release(fetched)

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shards."""
        return sum(layout.shard_numel * (layout.dtype or self.dtype).itemsize for layout in self.layouts)


class GradientStore(ABC):
    """This rank's shards of gradients, and the way of gradients into those of all ranks.

    Args:
        dtype: Of gradients on the way and in the shards.
    """

    #: Whether a push leaves this rank.
    pushes_to_peers: bool = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @abstractmethod
    def shard(self, index: int) -> torch.Tensor:
        """Return this rank's gradients, `[shard_numel]` of `dtype`, over memory that others add to.

        Raises:
            KeyError: The array is not trained.
        """

    @abstractmethod
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        """Start to add a gradient into its owners' shards. One-sided.

        Args:
            index: Of the array; a trainable one.
            gradient: `[n]` of `dtype`, contiguous, which was handed over; untouched until the push is waited for.
            start: Of its first element in the flat array.
        """

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return memory to lay gradients out in, where the model computes: `[num_bytes]` uint8, undefined."""
        return empty_host(num_bytes)

    def record_event(self, gradient: torch.Tensor) -> None:  # noqa: B027 - host memory is as it looks
        """Tell what the next push of a gradient comes after.

        To be called by the thread that computes, once it has given the device all that makes the gradient, and before
        `push`, which another thread may call.
        """


class Transport:
    """A group, a parameter store and a gradient store; and what becomes of their memory at the ordering points.

    Args:
        group: The ranks.
        parameters: Over memory of `hosts`.
        gradients: Over memory of `hosts`.
        storages: In the order in which their memory is made; freed in reverse.
        device: Where fetched arrays land and pushed gradients lie: where the model computes.
        threads: Whether several threads may fetch and push at a time. If not, the thread that computes does.
        one_sided: Whether fetches and pushes need nothing of other ranks. If not, they are collective: every rank makes
            the same ones in the same order, so that what is fetched must not depend on what happens to be there still.

    Raises:
        ValueError: A store's type is none that can travel, or be summed.
    """

    def __init__(
        self,
        group: Group,
        parameters: ParameterStore,
        gradients: GradientStore,
        storages: Sequence[ShardStorage],
        *,
        device: torch.device | None = None,
        threads: bool = True,
        one_sided: bool = True,
    ) -> None:
        if parameters.dtype not in PARAMETER_DTYPES:
            raise ValueError(f"param_dtype must be one of {PARAMETER_DTYPES}, got {parameters.dtype}")
        if gradients.dtype not in REDUCE_DTYPES:
            raise ValueError(f"reduce_dtype must be one of {REDUCE_DTYPES} (what MPI can add), got {gradients.dtype}")
        self.group = group
        self.parameters = parameters
        self.gradients = gradients
        self.storages = tuple(storages)
        self.device = device or torch.device("cpu")
        self.threads = threads
        self.one_sided = one_sided
        self._is_open = False

    def allocate(self, layouts: Sequence[Layout], close: Callable[[], None] | None = None) -> None:
        """Host zero-filled shards of these arrays, known by their index from here on. Collective, once.

        Args:
            layouts: The arrays.
            close: Called when the ranks part, if the transport is not closed before; `close` of the transport by
                default, and to call it in any case.
        """
        assert not self.parameters.layouts, "a transport allocates once"
        self.group.reserve(len(layouts), lambda: sum((host.plan(layouts) for host in self.storages), Footprint()))
        for host in self.storages:
            host.allocate()
        # Nobody may push into memory that its owner is still clearing.
        self._sync()
        self.group.open(close or self.close)
        self._sync()
        self._is_open = True

    def complete_gradients(self, report: np.ndarray) -> np.ndarray:
        """Ordering point A: complete all pushes everywhere. Collective.

        Args:
            report: `[k]` float64 to tell all ranks, with the same k on each.

        Returns:
            All reports, `[size, k]`.
        """
        self.group.set_status("flushing gradients")
        for host in self.storages:
            host.flush()
        reports = self.group.gradients_complete(report)
        for host in self.storages:
            host.complete()
        return reports

    def publish_parameters(self) -> None:
        """Ordering point B: all that owners wrote into their shards is in force everywhere. Collective."""
        self._sync()
        self.group.parameters_published()
        self._sync()

    def close(self) -> None:
        """Free the shards. Collective; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self.group.free(self.storages)
        self.parameters.buffers.clear()

    def _sync(self) -> None:
        for host in self.storages:
            host.sync()

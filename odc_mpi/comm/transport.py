"""The seam: all that a sharded model knows of communication.

A transport hosts this rank's shards of a list of flat arrays (`shard.layout.FlatLayout`): one of parameters each, and
one of gradients for those that are trained. Between two minibatches the ranks pass the ordering points

    A  complete_gradients   all pushes have arrived; owners may read their gradient shards
    N  sum_over_ranks       only to clip by the norm
    B  publish_parameters   all parameter shards are written, all gradient shards cleared; fetches and pushes may begin

and within a minibatch only one-sided `fetch` and `accumulate`, which need nothing of their owners. (The one exception,
`one_sided = False`, is the baseline that all this is measured against: `comm.collective`.)

`Transport` holds what every transport does alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from odc_mpi.comm.buffers import BufferPool, host_memory

#: What may travel as parameters: any floating-point type, as bytes.
PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: What may be summed at the target: MPI knows no bf16, and would add its bytes as integers.
REDUCE_DTYPES = (torch.float32, torch.float64)


class Layout(Protocol):
    """What a transport needs to know of a flat array."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def numel(self) -> int: ...  # noqa: D102
    @property
    def shard_numel(self) -> int: ...  # noqa: D102
    @property
    def trainable(self) -> bool: ...  # noqa: D102
    def owned(self, rank: int) -> tuple[int, int]: ...  # noqa: D102
    def owners(self, start: int, stop: int) -> range: ...  # noqa: D102


class Pending(Protocol):
    """A fetch or push on its way."""

    def wait(self) -> None:
        """Return once the operation is complete at this end. One-sided."""


class Done:
    """An operation that was complete when it was started."""

    def wait(self) -> None:
        """Return at once. Local."""


class Transport(ABC):
    """Hosts this rank's shards and reaches those of the others.

    Args:
        rank: This rank.
        size: Number of ranks.
        param_dtype: Of parameters on the way and in the shards.
        reduce_dtype: Of gradients on the way and in the shards.

    Attributes:
        buffers: Where fetches land; its peak tells the parameter memory beyond the shards.
    """

    #: What `comm.transport` calls it.
    name: str
    #: Whether a fetch moves bytes; if not, it is a view of memory that is there already, and nothing is fetched ahead.
    copies: bool = True
    #: Whether several threads may fetch and push at a time.
    threads: bool = True
    #: Whether fetches and pushes need nothing of other ranks. If not, they are collective: every rank makes the same
    #: ones in the same order, so that what is fetched must not depend on what happens to be there still.
    one_sided: bool = True
    #: Where fetched arrays land and pushed gradients lie: where the model computes. Shards are on the host.
    device: torch.device = torch.device("cpu")

    def __init__(self, rank: int, size: int, param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        if param_dtype not in PARAMETER_DTYPES:
            raise ValueError(f"param_dtype must be one of {PARAMETER_DTYPES}, got {param_dtype}")
        if reduce_dtype not in REDUCE_DTYPES:
            raise ValueError(f"reduce_dtype must be one of {REDUCE_DTYPES} (what MPI can add), got {reduce_dtype}")
        self.rank = rank
        self.size = size
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        self.buffers = BufferPool()
        self.layouts: tuple[Layout, ...] = ()
        self._num_collectives = 0

    @property
    def num_collectives(self) -> int:
        """Collective operations so far: those at the ordering points, and fetches and pushes that are. Local."""
        return self._num_collectives

    @abstractmethod
    def allocate(self, layouts: Sequence[Layout]) -> None:
        """Host zero-filled shards of these arrays, known by their index from here on. Collective, once."""

    @abstractmethod
    def parameter_shard(self, index: int) -> torch.Tensor:
        """Return this rank's parameters, `[shard_numel]` of `param_dtype`, over the memory that others fetch. Local."""

    @abstractmethod
    def gradient_shard(self, index: int) -> torch.Tensor:
        """Return this rank's gradients, `[shard_numel]` of `reduce_dtype`, over memory that others add to. Local."""

    @abstractmethod
    def start_fetch(self, index: int, buffer: torch.Tensor) -> Pending:
        """Start to fill `buffer`, `[numel]` of `param_dtype`, with a whole array. One-sided."""

    @abstractmethod
    def accumulate(self, index: int, gradient: torch.Tensor, start: int = 0) -> Pending:
        """Start to add a gradient into its owners' shards. One-sided.

        Args:
            index: Of the array; a trainable one.
            gradient: `[n]` of `reduce_dtype`, for the elements from `start` on; untouched until the push is waited for.
            start: Of the first element.
        """

    @abstractmethod
    def complete_gradients(self, report: np.ndarray) -> np.ndarray:
        """Ordering point A: complete all pushes everywhere. Collective.

        Args:
            report: `[k]` float64 to tell all ranks, with the same k on each.

        Returns:
            All reports, `[size, k]`.
        """

    @abstractmethod
    def sum_over_ranks(self, values: np.ndarray) -> np.ndarray:
        """Ordering point N: sum `[k]` float64 over all ranks, to the last bit the same on each. Collective."""

    @abstractmethod
    def publish_parameters(self) -> None:
        """Ordering point B: all that owners wrote into their shards is in force everywhere. Collective."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a contiguous tensor with rank 0's. Collective; for start-up."""

    @abstractmethod
    def close(self) -> None:
        """Free the shards. Collective; a second call does nothing."""

    def note(self, what: str, microbatch: int = 0) -> None:  # noqa: B027 - nobody need listen
        """Tell the other ranks what this one is doing, should they wait for it in vain. Local.

        Args:
            what: Such as "forward of unit layers.3".
            microbatch: Its number in this minibatch, from 1; 0 outside of microbatches.
        """

    def host_memory(self) -> list[torch.Tensor]:
        """Return the host memory of the shards, and of what fetches read in place, each piece once. Local."""
        return []

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Return memory on `device`, `[num_bytes]` uint8, its content undefined. Local."""
        return host_memory(num_bytes)

    def hand_over(self, memory: torch.Tensor) -> None:  # noqa: B027 - host memory is as it looks
        """Tell what the next fetch into some memory, or push from it, comes after. Local.

        To be called by the thread that computes, once it has given the device all that uses the memory, and before
        `start_fetch` or `accumulate`, which another thread may call.

        Args:
            memory: What the operation will fill or read.
        """

    def fetch(self, index: int) -> "Fetch":
        """Start to fetch a whole array. One-sided."""
        buffer = self.take(index)
        return Fetch(buffer, self.start_fetch(index, buffer))

    def take(self, index: int) -> torch.Tensor:
        """Return a buffer to fetch an array into, handed over already. Local, by the thread that computes."""
        buffer = self.buffers.take(self.layouts[index].numel, self.param_dtype)
        self.hand_over(buffer)
        return buffer

    def release(self, fetched: torch.Tensor) -> None:
        """Give back what a fetch returned. Local. Tensors that still look at it keep the memory until they are gone."""
        self.buffers.give_back(fetched)

    @property
    def parameter_shard_bytes(self) -> int:
        """Bytes of this rank's parameter shards. Local."""
        return sum(layout.shard_numel for layout in self.layouts) * self.param_dtype.itemsize


@dataclass
class Fetch:
    """A fetch on its way."""

    buffer: torch.Tensor
    pending: Pending

    def wait(self) -> torch.Tensor:
        """Return the whole array, `[numel]` of `param_dtype`, once it is there. One-sided."""
        self.pending.wait()
        return self.buffer

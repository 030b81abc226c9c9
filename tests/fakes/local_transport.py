"""N ranks in the threads of one process, and a transport between them that needs no MPI."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from odc_mpi.comm.group import Group
from odc_mpi.comm.layout import FlatLayout, ranges_by_owner
from odc_mpi.comm.transport import Access, GradientStore, ParameterStore, ShardStorage, Transport
from odc_mpi.comm.work import FetchWork, Work


@dataclass
class LocalGroup:
    """State shared by the ranks of a `LocalTransport`. A lost rank ends the others after `timeout_s`."""

    size: int
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(self.size, timeout=self.timeout_s)
        self.board: list[Any] = [None] * self.size
        self.parameters: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        self.gradients: list[list[torch.Tensor]] = [[] for _ in range(self.size)]


class LocalTransport(Transport, Group):
    """One of N ranks that live in the threads of one process.

    It is its own group, and its stores ask it for everything, so that what a test changes is in one place.
    """

    access = Access.COPY
    thread_safe = True
    one_sided = True

    def __init__(
        self,
        group: LocalGroup,
        rank: int,
        param_dtype: torch.dtype = torch.float32,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._group = group
        self.world = self.island = self
        self.rank, self.size, self.node_ranks = rank, group.size, range(group.size)
        self.layouts: tuple[FlatLayout, ...] = ()
        parameters = LocalParameters(self, group.parameters, param_dtype)
        gradients = LocalGradients(self, group.gradients, reduce_dtype)
        stores = [parameters, gradients]
        super().__init__(self, *stores, stores, thread_safe=self.thread_safe, one_sided=self.one_sided)

    @property
    def buffers(self) -> Any:
        return self.parameters.buffers

    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        for owner in range(self.size):
            start, stop = self.layouts[index].owned(owner)
            buffer[start:stop] = self._group.parameters[owner][index][: stop - start]
        return Work()

    def fetch(self, index: int) -> FetchWork:
        return ParameterStore.fetch(self.parameters, index)

    def release(self, fetched: torch.Tensor) -> None:
        ParameterStore.release(self.parameters, fetched)

    def accumulate(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        layout, stop = self.layouts[index], start + gradient.numel()
        for owner, begin, end in ranges_by_owner(layout.shard_numel, self.rank, start, stop):
            first = owner * layout.shard_numel
            with self._group.lock:
                self._group.gradients[owner][index][begin - first : end - first] += gradient[
                    begin - start : end - start
                ]
        return Work()

    def require_same(self, value: str, what: str) -> None:
        pass

    def reserve(self, plan: Callable[[], int]) -> None:
        plan()

    def open(self, close: Callable[[], None]) -> None:
        self._group.barrier.wait()

    def gradients_complete(self, report: np.ndarray) -> np.ndarray:
        return self._exchange(report)

    def norm(self, values: np.ndarray) -> np.ndarray:
        return self._exchange(values).sum(axis=0, keepdims=True)

    def parameters_published(self) -> None:
        self.num_collectives += 1
        self._group.barrier.wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self.rank == 0:
            self._group.board[0] = tensor
        self._group.barrier.wait()
        if self.rank:
            tensor.copy_(self._group.board[0])
        self._group.barrier.wait()

    def set_status(self, what: str, microbatch: int = 0) -> None:
        pass

    def free(self, storages: Sequence[ShardStorage]) -> None:
        for host in reversed(storages):
            host.free()

    def gather(self, value: Any) -> list[Any]:
        self._group.board[self.rank] = value
        self._group.barrier.wait()
        everyone = list(self._group.board)
        # No rank may write the board again before all have read it.
        self._group.barrier.wait()
        return everyone

    def _exchange(self, values: np.ndarray) -> np.ndarray:
        self.num_collectives += 1
        return np.stack(self.gather(values.copy()))


class LocalShards(ShardStorage):
    """One rank's shards of one kind, which the others see."""

    def __init__(self, transport: LocalTransport, shards: list[list[torch.Tensor]], dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._transport, self._shards = transport, shards

    def plan(self, layouts: Sequence[FlatLayout]) -> int:
        self._transport.layouts = tuple(layouts)
        return 0

    def allocate(self) -> None:
        shards = [torch.zeros(layout.shard_numel, dtype=self.dtype) for layout in self._transport.layouts]
        self._shards[self._transport.rank] = shards

    def free(self) -> None:
        self._shards[self._transport.rank].clear()

    def shard(self, index: int) -> torch.Tensor:
        return self._shards[self._transport.rank][index]


class LocalParameters(LocalShards, ParameterStore):
    @property
    def access(self) -> Access:
        return self._transport.access

    @property
    def layouts(self) -> Sequence[FlatLayout]:
        return self._transport.layouts

    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        return self._transport.start_fetch(index, buffer)

    def fetch(self, index: int) -> FetchWork:
        return self._transport.fetch(index)

    def release(self, fetched: torch.Tensor) -> None:
        self._transport.release(fetched)


class LocalGradients(LocalShards, GradientStore):
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        return self._transport.accumulate(index, gradient, start)

"""N ranks in the threads of one process, and a transport between them that needs no MPI."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from odc_mpi.comm.transport import Done, Layout, Pending, Transport


@dataclass
class LocalGroup:
    """What the ranks of a `LocalTransport` share. A lost rank ends the others after `timeout_s`."""

    size: int
    timeout_s: float = 60.0
    parameters: list[list[torch.Tensor]] = field(default_factory=list)
    gradients: list[list[torch.Tensor]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=self.timeout_s)
        self.board: list[np.ndarray | torch.Tensor | None] = [None] * self.size
        self.parameters = [[] for _ in range(self.size)]
        self.gradients = [[] for _ in range(self.size)]


class LocalTransport(Transport):
    """One of N ranks that live in the threads of one process.

    Args:
        group: Shared by all ranks.
        rank: This one.
        param_dtype: As for any transport.
        reduce_dtype: As for any transport.
    """

    name = "local"

    def __init__(
        self,
        group: LocalGroup,
        rank: int,
        param_dtype: torch.dtype = torch.float32,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(rank, group.size, param_dtype, reduce_dtype)
        self._group = group

    def allocate(self, layouts: Sequence[Layout]) -> None:
        self.layouts = tuple(layouts)
        self._group.parameters[self.rank] = [torch.zeros(x.shard_numel, dtype=self.param_dtype) for x in layouts]
        self._group.gradients[self.rank] = [torch.zeros(x.shard_numel, dtype=self.reduce_dtype) for x in layouts]
        self._group.barrier.wait()

    def parameter_shard(self, index: int) -> torch.Tensor:
        return self._group.parameters[self.rank][index]

    def gradient_shard(self, index: int) -> torch.Tensor:
        return self._group.gradients[self.rank][index]

    def start_fetch(self, index: int, buffer: torch.Tensor) -> Pending:
        for owner in range(self.size):
            start, stop = self.layouts[index].owned(owner)
            buffer[start:stop] = self._group.parameters[owner][index][: stop - start]
        return Done()

    def accumulate(self, index: int, gradient: torch.Tensor, start: int = 0) -> Pending:
        layout, stop = self.layouts[index], start + gradient.numel()
        for owner in layout.owners(start, stop):
            first, last = layout.owned(owner)
            begin, end = max(start, first), min(stop, last)
            with self._group.lock:
                self._group.gradients[owner][index][begin - first : end - first] += gradient[
                    begin - start : end - start
                ]
        return Done()

    def complete_gradients(self, report: np.ndarray) -> np.ndarray:
        return self._exchange(report)

    def sum_over_ranks(self, values: np.ndarray) -> np.ndarray:
        return self._exchange(values).sum(axis=0)

    def publish_parameters(self) -> None:
        self._num_collectives += 1
        self._group.barrier.wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self.rank == 0:
            self._group.board[0] = tensor
        self._group.barrier.wait()
        if self.rank:
            source = self._group.board[0]
            assert isinstance(source, torch.Tensor)
            tensor.copy_(source)
        self._group.barrier.wait()

    def close(self) -> None:
        self._group.parameters[self.rank].clear()
        self._group.gradients[self.rank].clear()

    def _exchange(self, values: np.ndarray) -> np.ndarray:
        self._num_collectives += 1
        self._group.board[self.rank] = values.copy()
        self._group.barrier.wait()
        everyone = np.stack([np.asarray(values) for values in self._group.board])
        # Nobody may write the board again before all have read it.
        self._group.barrier.wait()
        return everyone

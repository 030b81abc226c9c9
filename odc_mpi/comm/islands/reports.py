"""Reports between ranks of a column: small messages on what a rank has shown, received and decided.

A report goes only to ranks that the sender believes to be active, because over TCP what is sent to a stopped process
does not complete before it continues. A state (`send_state`) goes to a rank that has asked for it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from odc_mpi.runtime.deadline import wait_until
from odc_mpi.runtime.world import World

_REPORT, _STATE, _TENSOR = range(3)


class Reports:
    """Latest report of each rank of a column. Construction is collective over the column.

    A rank changes its own entries, and then calls `send`.

    Attributes:
        shown, decided: Numbers of the latest message that each rank has shown, and of the latest one that it knows to
            be decided, int64 `[ranks]`.
        requested: Number that each rank has requested, int64 `[ranks]`.
        asks: True for ranks that ask this rank for its state, bool `[ranks]`.
        have: `have[i, j]` is True if rank i has message `shown[i]` of rank j, bool `[ranks, ranks]`.
    """

    def __init__(self, column: World) -> None:
        with column.collective("duplicating the communicator of islands"):
            self._comm = column.comm.Dup()
        column.on_close(self._comm.Free)
        self._column, size = column, column.size
        self.shown, self.decided, self.requested = np.zeros((3, size), dtype=np.int64)
        self.asks, self._has_ended = np.zeros((2, size), dtype=bool)
        self.have = np.zeros((size, size), dtype=bool)
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []

    def send(self, ranks: Iterable[int], *, asks: bool = False) -> None:
        """Send this rank's entries. `asks` is True to ask for the state of `ranks`. Does not wait."""
        me = self._column.rank
        numbers = self.shown[me], self.decided[me], self.requested[me], asks, self._has_ended[me]
        report = np.array([*numbers, *self.have[me]], dtype=np.int64)
        for rank in ranks:
            self._start(report, rank, _REPORT)

    def receive(self) -> list[int]:
        """Read the reports that have arrived, and return their senders. Does not wait."""
        heard, status, report = [], MPI.Status(), np.empty(5 + self._column.size, dtype=np.int64)
        while self._comm.Iprobe(MPI.ANY_SOURCE, _REPORT, status):
            rank = status.Get_source()
            self._comm.Recv(report, rank, _REPORT)
            self.shown[rank], self.decided[rank], self.requested[rank] = report[:3]
            self.asks[rank], self._has_ended[rank] = report[3:5]
            self.have[rank] = report[5:]
            heard.append(rank)
        return heard

    def send_state(self, rank: int, state: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """Send JSON-serializable values and copies of tensors to a rank that has asked for them. Does not wait."""
        self._start(np.frombuffer(json.dumps(state).encode(), np.uint8), rank, _STATE)
        for tensor in tensors:
            self._start(tensor.detach().to("cpu", copy=True).numpy(), rank, _TENSOR)

    def receive_state(self, rank: int, like: Sequence[torch.Tensor]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Wait for what `send_state` sends on rank `rank`: the values, and tensors on the host, shaped as `like`."""
        what, status = "receiving the parameters of another island", MPI.Status()
        with self._column.deadline(what, [rank]):
            wait_until(lambda: self._comm.Iprobe(rank, _STATE, status), self._column.progress.run_tasks)
        encoded = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        tensors = [torch.empty(each.shape, dtype=each.dtype) for each in like]
        buffers = [(encoded, _STATE), *((each.numpy(), _TENSOR) for each in tensors)]
        for request in [self._comm.Irecv(buffer, rank, tag) for buffer, tag in buffers]:
            with self._column.deadline(what, [rank]):
                wait_until(request.Test, self._column.progress.run_tasks)
        return json.loads(encoded.tobytes()), tensors

    def finish(self) -> None:
        """Wait until no report is in flight, so that none reaches a later communicator. Collective over the column."""
        me, what = self._column.rank, "ending the reports of islands"
        others = [rank for rank in range(self._column.size) if rank != me]
        self._has_ended[me] = True
        self.send(others)

        def is_complete() -> bool:
            self.receive()
            return bool(self._has_ended.all()) and all(request.Test() for request, _ in self._sent)

        with self._column.deadline(what, others):
            wait_until(is_complete, self._column.progress.run_tasks)

    def _start(self, buffer: np.ndarray, rank: int, tag: int) -> None:
        self._sent = [each for each in self._sent if not each[0].Test()]
        self._sent.append((self._comm.Isend(buffer, rank, tag), buffer))

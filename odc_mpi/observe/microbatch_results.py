"""Losses and times of microbatches, read without idling the GPU.

A backward pass returns before the GPU has finished it. If the host read each loss immediately, the GPU would idle until
it got new kernels. `DeviceResults` therefore reads losses at the end of the minibatch, and measures times with events.
"""

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch
from typing_extensions import override

from odc_mpi.data.microbatch import Microbatch
from odc_mpi.observe.callback import MicrobatchResult


class MicrobatchResults:
    """Results of microbatches computed on the host. Each is complete when the backward pass returns.

    `clock` returns a time in seconds and must not advance while this rank waits for slower ranks.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = self._busy_s = 0.0

    def begin(self) -> None:
        """Begin a microbatch."""
        self._began, self._busy_s = perf_counter(), self._clock()

    def end(self, microbatch: Microbatch, values: torch.Tensor) -> list[MicrobatchResult]:
        """End a microbatch, and return the results that are complete, in order.

        `values`, float64 `[1 + k]`, contains the microbatch's loss, followed by the objective's `k` statistics.
        """
        loss, *statistics = values.tolist()
        busy_s = self._clock() - self._busy_s
        return [MicrobatchResult(microbatch, loss, statistics, self._began, perf_counter(), busy_s)]

    def drain(self) -> list[MicrobatchResult]:
        """Return all results that `end` has not returned, in order. Waits for the device."""
        return []


class _Pending(NamedTuple):
    """Microbatch that a GPU may still be computing. `waited_s` is the time of waits for slower ranks, in seconds."""

    microbatch: Microbatch
    values: torch.Tensor
    began: torch.cuda.Event
    ended: torch.cuda.Event
    waited_s: float


class DeviceResults(MicrobatchResults):
    """Results of microbatches on a GPU, which are complete at the end of the minibatch.

    The host runs at most one microbatch ahead of the GPU. Otherwise, it could claim microbatches that other ranks could
    compute sooner.
    """

    def __init__(self, clock: Callable[[], float], device: torch.device) -> None:
        super().__init__(clock)
        self._device = device
        self._pending: deque[_Pending] = deque()

    @override
    def begin(self) -> None:
        super().begin()
        self._event = _record(self._device)

    @override
    def end(self, microbatch: Microbatch, values: torch.Tensor) -> list[MicrobatchResult]:
        waited_s = perf_counter() - self._began - (self._clock() - self._busy_s)
        self._pending.append(_Pending(microbatch, values, self._event, _record(self._device), waited_s))
        if len(self._pending) > 1:
            self._pending[-2].ended.synchronize()
        return []

    @override
    def drain(self) -> list[MicrobatchResult]:
        pending, self._pending = list(self._pending), deque()
        if not pending:
            return []
        rows = torch.stack([each.values for each in pending]).tolist()
        last = pending[-1].ended
        last.synchronize()
        now = perf_counter()
        results = []
        for each, (loss, *statistics) in zip(pending, rows, strict=True):
            ended, took_s = now - _seconds(each.ended, last), _seconds(each.began, each.ended)
            busy_s = max(0.0, took_s - each.waited_s)
            results.append(MicrobatchResult(each.microbatch, loss, statistics, ended - took_s, ended, busy_s))
        return results


def _record(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    return began.elapsed_time(ended) / 1000

"""Prediction of the next units to be used, and threads that overlap fetches and pushes with computation.

    main thread    computes, decides what to fetch, acquires and releases buffers; calls the synchronization points
    fetch thread   runs fetches of the units expected next, one at a time
    push thread    runs pushes, one at a time; separate, so that no fetch queues behind a long push

The fetch and push threads run only transport operations. No other thread accesses the buffers of an operation before
waiting for it. These threads are used only if several threads may call the transport (`Transport.thread_safe`), and
units are prefetched only if fetches are one-sided and transfer data (`ParameterStore.transfers`).
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from odc_mpi.comm.work import Work
from odc_mpi.shard.units.unit import Unit


class PrefetchPredictor:
    """Predictor for the order in which units are used.

    The next unit depends on the last two: layer 5 follows layer 4 in a forward pass, but layer 6 in a backward pass.
    The order is therefore stored as a map from the last two units to the next one. A new observation replaces the
    previous one for the same two units. Predictions may be wrong.
    """

    def __init__(self) -> None:
        self._following: dict[tuple[Unit | None, Unit | None], Unit] = {}
        self._last_two: tuple[Unit | None, Unit | None] = (None, None)

    def reset_position(self) -> None:
        """Forget the last two units, but not the observed order. Call this method at the end of a minibatch."""
        self._last_two = (None, None)

    def record(self, unit: Unit) -> None:
        """Record the use of `unit`, which must differ from the unit in the previous call."""
        self._following[self._last_two] = unit
        self._last_two = self._last_two[1], unit

    def predict(self, count: int) -> list[Unit]:
        """Return the next `count` units to be used, or fewer if the order is not known. A unit may occur twice."""
        last_two = self._last_two
        units: list[Unit] = []
        while len(units) < count and last_two in self._following:
            units.append(self._following[last_two])
            last_two = last_two[1], units[-1]
        return units


class CommunicationThread:
    """Thread that runs transport operations one after another. It starts when the first operation is scheduled.

    The thread belongs to a `ThreadPoolExecutor`, so the interpreter joins it at exit, before MPI is finalized. This
    does not hang, because an operation that exceeds its deadline ends the job.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def start(self, operation: Callable[..., Work], *arguments: Any) -> Work:
        """Schedule `operation`, such as a `start_fetch` or `push`, to run on the thread until its `Work` is complete.

        Do not access the memory of the arguments until the `wait` method of the returned handle has returned. If the
        operation raises an exception, so does `wait`.
        """
        return Work(self._executor.submit(_complete, [operation, *arguments]).result)

    def close(self) -> None:
        """Complete all scheduled operations and end the thread. Idempotent."""
        self._executor.shutdown()


def _complete(call: list[Any]) -> torch.cuda.Event | None:
    # Emptied, because the executor drops its reference to `call` only after notifying the waiting thread, and a buffer
    # pool does not reuse a buffer that is still referenced.
    operation, *arguments = call
    call.clear()
    # A buffer allocated in inference mode may be written only in inference mode, where any other buffer may be, too.
    with torch.inference_mode():
        return operation(*arguments).complete()

"""Prediction of the units used next, and threads that fetch and push overlapped with computation.

    main thread    computes, decides, acquires and releases buffers, waits; calls the synchronization points
    fetch thread   runs fetches of the units expected next, one at a time
    push thread    runs pushes, one at a time; separate, so that no fetch queues behind a long push

The threads run only operations of the transport, on buffers that no other thread accesses until it has waited for the
operation. They are used only if several threads may call the transport (`Transport.thread_safe`). Units are prefetched
only if fetches copy data (`ParameterStore.access`).
"""

from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

from odc_mpi.comm.work import DeferredWork, Work

K = TypeVar("K", bound=Hashable)


class PrefetchPredictor(Generic[K]):
    """Predictor of the order in which units are used.

    The next unit depends on the last two: layer 5 after layer 4 is a forward, after layer 6 a backward. The order is
    therefore a map from the last two units to the next one; the latest observation wins. A prediction may be wrong.
    """

    def __init__(self) -> None:
        self._following: dict[tuple[K | None, K | None], K] = {}
        self._last_two: tuple[K | None, K | None] = (None, None)

    def reset_position(self) -> None:
        """Forget the last two units, but not the order: a minibatch has ended."""
        self._last_two = (None, None)

    def record(self, unit: K) -> None:
        """Record the use of a unit that differs from the last one."""
        self._following[self._last_two] = unit
        self._last_two = self._last_two[1], unit

    def predict(self, count: int) -> list[K]:
        """Return the units of the next `count` uses, fewer if the order is not known so far. A unit may occur twice."""
        last_two = self._last_two
        units: list[K] = []
        while len(units) < count and last_two in self._following:
            units.append(self._following[last_two])
            last_two = last_two[1], units[-1]
        return units


class CommunicationThread:
    """Thread that runs operations of a transport, each to completion before the next. It starts with the first.

    It is an executor of the standard library: the interpreter joins its thread at exit, so that no operation is
    interrupted by the end of MPI. Every operation ends, since its deadline otherwise ends the job.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def start(self, operation: Callable[..., Work], *arguments: Any) -> Work:
        """Start `start_fetch` or `push` of a store, and complete it in the thread.

        Do not access the memory of the arguments before it is complete. `Work.wait` raises its exception.
        """
        return DeferredWork(self._executor.submit(_complete, [operation, *arguments]).result)

    def close(self) -> None:
        """Complete all started operations and end the thread. Idempotent."""
        self._executor.shutdown()


def _complete(call: list[Any]) -> None:
    # Emptied: the executor drops its reference to `call` only after it has notified the waiting thread, and a buffer
    # pool does not reuse a buffer that is still referenced.
    operation, *arguments = call
    call.clear()
    # A buffer allocated in inference mode may be written in inference mode only; any other buffer may be, too.
    with torch.inference_mode():
        operation(*arguments).wait()

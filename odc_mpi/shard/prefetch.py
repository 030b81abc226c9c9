"""What happens beside the computation: a guess at the unit that comes next, and threads that fetch and push meanwhile.

    main thread    computes, decides, takes and gives buffers, waits; alone passes the points A, N and B
    fetch thread   one fetch after the other, of units that are likely to be needed next
    push thread    one push after the other; a thread of its own, so that no fetch queues behind a long push

Threads run nothing but operations of the transport, on buffers that nobody else touches until the operation was waited
for. A transport says whether it can be called like that (`threads`), and whether fetches move bytes (`access`), without
which fetching ahead is of no use.
"""

from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

from odc_mpi.comm.work import DeferredWork, Work

K = TypeVar("K", bound=Hashable)


class PrefetchPredictor(Generic[K]):
    """Learns in which order units are used, and tells which come next.

    What follows a unit depends on the one before it: layer 5 after layer 4 is a forward, after layer 6 a backward. So
    the order is kept as a map from the last two to the next, always the latest that was seen. A guess may be wrong.
    """

    def __init__(self) -> None:
        self._following: dict[tuple[K | None, K | None], K] = {}
        self._last_two: tuple[K | None, K | None] = (None, None)

    def reset_position(self) -> None:
        """Forget where we are, not the order: a minibatch has ended."""
        self._last_two = (None, None)

    def record(self, unit: K) -> None:
        """Learn that a unit is used now, another than the last."""
        self._following[self._last_two] = unit
        self._last_two = self._last_two[1], unit

    def predict(self, count: int) -> list[K]:
        """Return the next `count` uses, fewer where nothing was learnt; the same unit may come twice."""
        place = self._last_two
        units: list[K] = []
        while len(units) < count and place in self._following:
            units.append(self._following[place])
            place = place[1], units[-1]
        return units


class CommunicationThread:
    """Runs operations of a transport one after the other, each to its completion. The thread starts with the first.

    An executor of the standard library: the interpreter joins its thread before it ends, so that no operation is cut
    off by the end of MPI. No operation lasts for ever: each has a deadline, under which it ends or the job does.

    Args:
        name: Of the thread, for debuggers.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def start(self, operation: Callable[..., Work], *arguments: Any) -> Work:
        """Start an operation and see to its completion in the thread.

        Args:
            operation: `start_fetch` or `push` of a store.
            arguments: Its arguments; memory among them belongs to the operation until it was waited for.

        Returns:
            To wait with; raises there what the operation raised.
        """
        return DeferredWork(self._executor.submit(_complete, [operation, *arguments]).result)

    def close(self) -> None:
        """Complete what was started and end the thread. Local; a second call does nothing."""
        self._executor.shutdown()


def _complete(call: list[Any]) -> None:
    # Emptied: the executor lets go of `call` only after it has told the waiting thread, and a buffer pool that still
    # sees somebody look at a buffer would take a new one.
    operation, *arguments = call
    call.clear()
    # A buffer that was taken in inference mode may be written in inference mode only; any other may be, too.
    with torch.inference_mode():
        operation(*arguments).wait()

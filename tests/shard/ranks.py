"""N ranks in the threads of this process, and transports that write down what happens."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from odc_mpi.comm.transport import Layout, LocalGroup, LocalTransport, Pending

T = TypeVar("T")

#: Seconds that one test's ranks may take together; they need a fraction of a second.
TIMEOUT_S = 30.0


class RecordingTransport(LocalTransport):
    """Writes down every operation, in order.

    Attributes:
        log: Of `(operation, name of the flat array)`; collectives have no array.
    """

    log: list[tuple[str, str]]

    def names(self, *operations: str) -> list[str]:
        """The arrays of these operations, in order."""
        return [name for operation, name in self.log if operation in operations]

    def collectives(self) -> list[str]:
        """The collective operations in order."""
        return [operation for operation, _ in self.log if operation not in ("fetch", "push")]

    def allocate(self, layouts: Sequence[Layout]) -> None:
        self.log = [("allocate", "")]
        super().allocate(layouts)

    def start_fetch(self, index: int, buffer: torch.Tensor) -> Pending:
        self.log.append(("fetch", self.layouts[index].name))
        return super().start_fetch(index, buffer)

    def accumulate(self, index: int, gradient: torch.Tensor, start: int = 0) -> Pending:
        self.log.append(("push", self.layouts[index].name))
        return super().accumulate(index, gradient, start)

    def complete_gradients(self, report: np.ndarray) -> np.ndarray:
        self.log.append(("A", ""))
        return super().complete_gradients(report)

    def sum_over_ranks(self, values: np.ndarray) -> np.ndarray:
        self.log.append(("N", ""))
        return super().sum_over_ranks(values)

    def publish_parameters(self) -> None:
        self.log.append(("B", ""))
        super().publish_parameters()

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.log.append(("broadcast", ""))
        super().broadcast(tensor)


def run_ranks(
    size: int,
    work: Callable[[RecordingTransport], T],
    param_dtype: torch.dtype = torch.float64,
    reduce_dtype: torch.dtype = torch.float64,
    transport: type[RecordingTransport] = RecordingTransport,
    timeout_s: float = TIMEOUT_S,
) -> list[T]:
    """Run `work` on every rank; return what they return, or raise what failed first.

    A failing rank breaks the barrier, so that no other waits for it; a rank that hangs elsewhere is left behind.
    """
    group = LocalGroup(size, timeout_s)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(transport(group, rank, param_dtype, reduce_dtype))
        except threading.BrokenBarrierError as error:
            failures.append(error)  # because of another rank, or of the deadline
        except BaseException as error:
            failures.insert(0, error)
            group.barrier.abort()

    deadline = time.monotonic() + timeout_s
    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if failures:
        raise failures[0]
    late = [thread.name for thread in threads if thread.is_alive()]
    if late:
        raise TimeoutError(f"{', '.join(late)} still at work after {timeout_s:g} s")
    return [results[rank] for rank in range(size)]

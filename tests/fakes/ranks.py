"""N ranks in the threads of this process, and transports that write down what happens."""

import functools
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from local_transport import LocalGroup, LocalTransport

from odc_mpi.comm.buffers import BufferPool
from odc_mpi.comm.transport import Access, ShardStorage
from odc_mpi.comm.work import FetchWork, Work

T = TypeVar("T")

#: Seconds that one test's ranks may take together; they need a fraction of a second.
TIMEOUT_S = 30.0


class RecordingTransport(LocalTransport):
    """Writes down every fetch and push with the name of the flat array, in order."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.log: list[tuple[str, str]] = []

    def names(self, *operations: str) -> list[str]:
        """The arrays of these operations, in order."""
        return [name for operation, name in self.log if operation in operations]

    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        self.log.append(("fetch", self.layouts[index].name))
        return super().start_fetch(index, buffer)

    def accumulate(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        self.log.append(("push", self.layouts[index].name))
        return super().accumulate(index, gradient, start)


class InPlaceTransport(RecordingTransport):
    """Fetches the one rank's window itself, as with zero-copy."""

    access = Access.VIEW

    def fetch(self, index: int) -> FetchWork:
        return FetchWork(self.parameters.shard(index)[: self.layouts[index].numel], Work())

    def release(self, fetched: torch.Tensor) -> None:
        pass


class KeepingTransport(InPlaceTransport):
    """Fetches a window that autograd may save."""

    access = Access.KEEP


class PoisoningPool(BufferPool):
    """Fills buffers with NaN when they are lent and when they come back."""

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return super().acquire(numel, dtype).fill_(float("nan"))

    def release(self, buffer: torch.Tensor) -> None:
        with torch.inference_mode():  # it may have been taken there
            buffer.fill_(float("nan"))
        super().release(buffer)


class LatePool(BufferPool):
    """Lends buffers full of NaN; takes none back that an operation still writes. Autograd may read released ones."""

    def __init__(self) -> None:
        super().__init__()
        self.on_the_way: set[int] = set()

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = super().acquire(numel, dtype).fill_(float("nan"))
        self.on_the_way.add(buffer.untyped_storage().data_ptr())
        return buffer

    def release(self, buffer: torch.Tensor) -> None:
        assert buffer.untyped_storage().data_ptr() not in self.on_the_way, "given back while being filled"
        super().release(buffer)


class LateTransport(RecordingTransport):
    """Whatever is started happens at the very end of the wait, and what the seam forbids is noticed."""

    fetch_s = push_s = 0.001

    def reserve(self, plan: Callable[[], int]) -> None:
        self.parameters.buffers = LatePool()
        self._between_a_and_b = True
        super().reserve(plan)

    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        fill = super().start_fetch

        def arrive() -> None:
            time.sleep(self.fetch_s)
            assert not self._between_a_and_b, "fetching between A and B"
            fill(index, buffer)
            self.buffers.on_the_way.remove(buffer.untyped_storage().data_ptr())

        return Work(arrive)

    def accumulate(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        before, send = gradient.clone(), super().accumulate

        def arrive() -> None:
            time.sleep(self.push_s)
            assert not self._between_a_and_b, "pushing between A and B"
            assert torch.equal(before, gradient) or before.isnan().any(), "written to while it was pushed"
            send(index, gradient, start)

        return Work(arrive)

    def gradients_complete(self, report: np.ndarray) -> np.ndarray:
        assert not self.buffers.on_the_way, "fetching while gradients are completed"
        self._between_a_and_b = True
        return super().gradients_complete(report)

    def parameters_published(self) -> None:
        assert not self.buffers.on_the_way, "fetching while parameters are published"
        super().parameters_published()
        self._between_a_and_b = False

    def free(self, storages: Sequence[ShardStorage]) -> None:
        assert not self.buffers.on_the_way, "fetching from windows that are freed"
        super().free(storages)


def run_threads(
    size: int, work: Callable[[int], T], barrier: threading.Barrier, timeout_s: float = TIMEOUT_S
) -> list[T]:
    """Run `work(rank)` in a thread for each rank; return the results, or raise what failed first.

    A failing rank breaks the barrier, so that no other waits for it; a rank that hangs elsewhere is left behind.
    """
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except threading.BrokenBarrierError as error:
            failures.append(error)  # because of another rank, or of the deadline
        except BaseException as error:
            failures.insert(0, error)
            barrier.abort()

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


def run_ranks(
    size: int,
    work: Callable[[RecordingTransport], T],
    param_dtype: torch.dtype = torch.float64,
    reduce_dtype: torch.dtype = torch.float64,
    transport: Callable[..., Any] = RecordingTransport,
    timeout_s: float = TIMEOUT_S,
) -> list[T]:
    """Run `work` on every rank's transport, as `run_threads`."""
    group = LocalGroup(size, timeout_s)
    return run_threads(
        size, lambda rank: work(transport(group, rank, param_dtype, reduce_dtype)), group.barrier, timeout_s
    )


def on_ranks(size: int = 0, **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on every rank, each with its transport as first argument; settings as for `run_ranks`.

    Its parameters `size`, `param_dtype`, `reduce_dtype` and `kind`, the transport, apply to the ranks, too.
    """
    names = {"param_dtype": "param_dtype", "reduce_dtype": "reduce_dtype", "kind": "transport"}

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def on_all(**arguments: Any) -> None:
            own = {names[name]: value for name, value in arguments.items() if name in names}
            run_ranks(size or arguments["size"], lambda transport: test(transport, **arguments), **settings | own)

        functools.update_wrapper(on_all, test)
        own = inspect.signature(test)
        on_all.__signature__ = own.replace(parameters=list(own.parameters.values())[1:])  # type: ignore[attr-defined]
        return on_all

    return decorate

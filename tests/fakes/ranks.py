"""N ranks in the threads of this process, and transports that write down what happens."""

import functools
import inspect
import threading
import time

import torch
from local_transport import LocalGroup, LocalTransport

from odc_mpi.comm.buffers import BufferPool
from odc_mpi.comm.transport import Access
from odc_mpi.comm.work import FetchWork, Work

#: Seconds that one test's ranks may take together; they need a fraction of a second.
TIMEOUT_S = 30.0


class RecordingTransport(LocalTransport):
    """Writes down every fetch and push with the name of the flat array, in order."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.log = []

    def names(self, *operations):
        """The arrays of these operations, in order."""
        return [name for operation, name in self.log if operation in operations]

    def start_fetch(self, index, buffer):
        self.log.append(("fetch", self.layouts[index].name))
        return super().start_fetch(index, buffer)

    def accumulate(self, index, gradient, start=0):
        self.log.append(("push", self.layouts[index].name))
        return super().accumulate(index, gradient, start)


class InPlaceTransport(RecordingTransport):
    """Fetches the one rank's window itself, as with zero-copy."""

    access = Access.VIEW

    def fetch(self, index):
        return FetchWork(self.parameters.shard(index)[: self.layouts[index].numel], Work())

    def release(self, fetched):
        pass


class KeepingTransport(InPlaceTransport):
    """Fetches a window that autograd may save."""

    access = Access.KEEP


class LatePool(BufferPool):
    """Lends buffers full of NaN; takes none back that an operation still writes. Autograd may read released ones."""

    def __init__(self):
        super().__init__()
        self.on_the_way = set()

    def acquire(self, numel, dtype):
        buffer = super().acquire(numel, dtype).fill_(float("nan"))
        self.on_the_way.add(buffer.untyped_storage().data_ptr())
        return buffer

    def release(self, buffer):
        assert buffer.untyped_storage().data_ptr() not in self.on_the_way, "given back while being filled"
        super().release(buffer)


class LateTransport(RecordingTransport):
    """Whatever is started happens at the very end of the wait, and what the seam forbids is noticed."""

    fetch_s = push_s = 0.001
    make_pool = LatePool

    def reserve(self, plan):
        self.parameters.buffers = self.make_pool()
        self._between_a_and_b = True
        super().reserve(plan)

    def start_fetch(self, index, buffer):
        fill = super().start_fetch

        def arrive():
            time.sleep(self.fetch_s)
            assert not self._between_a_and_b, "fetching between A and B"
            fill(index, buffer)
            self.buffers.on_the_way.remove(buffer.untyped_storage().data_ptr())

        return Work(arrive)

    def accumulate(self, index, gradient, start=0):
        before, send = gradient.clone(), super().accumulate

        def arrive():
            time.sleep(self.push_s)
            assert not self._between_a_and_b, "pushing between A and B"
            assert torch.equal(before, gradient) or before.isnan().any(), "written to while it was pushed"
            send(index, gradient, start)

        return Work(arrive)

    def gradients_complete(self, report):
        assert not self.buffers.on_the_way, "fetching while gradients are completed"
        self._between_a_and_b = True
        return super().gradients_complete(report)

    def parameters_published(self):
        assert not self.buffers.on_the_way, "fetching while parameters are published"
        super().parameters_published()
        self._between_a_and_b = False

    def free(self, storages):
        assert not self.buffers.on_the_way, "fetching from windows that are freed"
        super().free(storages)


def run_threads(size, work, barrier, timeout_s=TIMEOUT_S):
    """Run `work(rank)` in a thread for each rank; return the results, or raise what failed first.

    A failing rank breaks the barrier, so that no other waits for it; a rank that hangs elsewhere is left behind.
    """
    results = {}
    failures = []

    def run(rank):
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
    size, work, param_dtype=torch.float64, reduce_dtype=torch.float64, transport=RecordingTransport, timeout_s=TIMEOUT_S
):
    """Run `work` on every rank's transport, as `run_threads`."""
    group = LocalGroup(size, timeout_s)
    return run_threads(
        size, lambda rank: work(transport(group, rank, param_dtype, reduce_dtype)), group.barrier, timeout_s
    )


def on_ranks(size=0, **settings):
    """Run a test on every rank, each with its transport as first argument; settings as for `run_ranks`.

    Its parameters `size`, `param_dtype`, `reduce_dtype` and `kind`, the transport, apply to the ranks, too.
    """
    names = {"param_dtype": "param_dtype", "reduce_dtype": "reduce_dtype", "kind": "transport"}

    def decorate(test):
        def on_all(**arguments):
            from_test = {names[name]: value for name, value in arguments.items() if name in names}
            run_ranks(size or arguments["size"], lambda transport: test(transport, **arguments), **settings | from_test)

        functools.update_wrapper(on_all, test)
        signature = inspect.signature(test)
        on_all.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
        return on_all

    return decorate

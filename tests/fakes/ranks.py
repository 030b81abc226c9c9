"""N ranks in the threads of one process, and transports between them that need no MPI and write down what happens."""

import functools
import inspect
import threading
import time

import numpy as np
import torch

from odc_mpi.comm.group import Group
from odc_mpi.comm.layout import ranges_by_owner
from odc_mpi.comm.transport import GradientStore, ParameterStore, ShardStorage, Transport
from odc_mpi.comm.work import Work

#: Seconds that one test's ranks may take together; they need a fraction of a second.
TIMEOUT_S = 30.0


class LocalGroup:
    """State shared by the ranks of a `LocalTransport`. A lost rank ends the others after `timeout_s`."""

    def __init__(self, size, timeout_s=60.0):
        self.size = size
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.board, self.transports = [None] * size, [None] * size


class LocalTransport(Transport, Group):
    """One of N ranks that live in the threads of one process.

    It is its own group, and its stores ask it for everything, so that what a test changes is in one place.
    """

    transfers, stays_valid = True, False
    thread_safe = True

    def __init__(self, group, rank, param_dtype=torch.float32, reduce_dtype=torch.float32):
        self._group = group
        group.transports[rank] = self
        self.world = self.island = self
        self.rank, self.size, self.node_ranks = rank, group.size, range(group.size)
        parameters, gradients = LocalParameters(param_dtype), LocalGradients(reduce_dtype)
        for name in ("transfers", "stays_valid", "acquire_buffer", "start_fetch", "release"):
            setattr(parameters, name, getattr(self, name))
        gradients.push, gradients.flush, gradients.complete = self.accumulate, self.flush, self.complete
        stores = [parameters, gradients]
        super().__init__(self, *stores, stores, thread_safe=self.thread_safe)

    @property
    def layouts(self):
        return self.parameters.layouts

    @property
    def buffers(self):
        return self.parameters.buffers

    def start_fetch(self, index, buffer):
        for owner, transport in enumerate(self._group.transports):
            start, stop = self.layouts[index].owned(owner)
            buffer[start:stop] = transport.parameters.shard(index)[: stop - start]
        return Work()

    def acquire_buffer(self, index):
        return ParameterStore.acquire_buffer(self.parameters, index)

    def release(self, fetched):
        ParameterStore.release(self.parameters, fetched)

    def accumulate(self, index, gradient, start=0):
        numel, stop = self.layouts[index].shard_numel, start + gradient.numel()
        for owner, begin, end in ranges_by_owner(numel, self.rank, start, stop):
            sums = self._group.transports[owner].sums(index)
            with self._group.lock:
                sums[begin - owner * numel : end - owner * numel] += gradient[begin - start : end - start]
        return Work()

    def sums(self, index):
        """The memory to which others add."""
        return self.gradients.shard(index)

    def flush(self):
        pass

    def complete(self):
        pass

    def require_same(self, value, what):
        pass

    def reserve(self, plan):
        plan()

    def open(self, close):
        self._group.barrier.wait()

    def gather_values(self, values):
        return self._exchange(values)

    def gradients_complete(self, report):
        return self._exchange(report)

    def norm(self, values):
        return self._exchange(values).sum(axis=0)

    def parameters_published(self):
        self.num_collectives += 1
        self._group.barrier.wait()

    def broadcast(self, tensor):
        first, *_ = self.gather(tensor.clone())
        if self.rank:
            tensor.copy_(first)

    def set_status(self, what, microbatch=0):
        pass

    def free(self, storages):
        for storage in reversed(storages):
            storage.free()

    def gather(self, value):
        self._group.board[self.rank] = value
        self._group.barrier.wait()
        everyone = list(self._group.board)
        # No rank may write the board again before all have read it.
        self._group.barrier.wait()
        return everyone

    def _exchange(self, values):
        self.num_collectives += 1
        return np.stack(self.gather(values.copy()))


class LocalShards(ShardStorage):
    def shard(self, index):
        return self._shards[index]

    def free(self):
        self._shards.clear()


class LocalParameters(LocalShards, ParameterStore):
    start_fetch = None  # the transport's

    def allocate(self):
        self._shards = {i: torch.zeros(x.shard_numel, dtype=self.dtype) for i, x in enumerate(self.layouts)}


class LocalGradients(LocalShards, GradientStore):
    push = None  # the transport's `accumulate`

    def allocate(self):
        self._shards = {i: torch.zeros(numel, dtype=self.dtype) for i, numel in self.trainable_numels.items()}


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

    transfers = False

    def acquire_buffer(self, index):
        return self.parameters.shard(index)[: self.layouts[index].numel]

    def start_fetch(self, index, buffer):
        return Work()

    def release(self, fetched):
        pass


class KeepingTransport(InPlaceTransport):
    """Fetches a window that autograd may save."""

    stays_valid = True


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

"""N ranks in the threads of one process, and transports between them that need no MPI.

LocalTransport        does everything at once
RecordingTransport    writes down what happens
Adversary             is late, and notices haste
"""

import functools
import inspect
import random
import threading
import time
from functools import partial

import numpy as np
import torch
from delays import Borrowed, Delays, is_poisoned, poison

from odc_mpi.comm.buffers import _POOL_REFERENCES, BufferPool, _references, storage_address
from odc_mpi.comm.group import Group
from odc_mpi.comm.layout import ranges_by_owner
from odc_mpi.comm.transport import Access, GradientStore, ParameterStore, ShardStorage, Transport
from odc_mpi.comm.work import FetchWork, Work

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

    access = Access.COPY
    thread_safe = True

    def __init__(self, group, rank, param_dtype=torch.float32, reduce_dtype=torch.float32):
        self._group = group
        group.transports[rank] = self
        self.world = self.island = self
        self.rank, self.size, self.node_ranks = rank, group.size, range(group.size)
        parameters, gradients = LocalParameters(param_dtype), LocalGradients(reduce_dtype)
        for name in ("access", "start_fetch", "fetch", "release"):
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

    def fetch(self, index):
        return ParameterStore.fetch(self.parameters, index)

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

    access = Access.VIEW

    def fetch(self, index):
        return FetchWork(self.parameters.shard(index)[: self.layouts[index].numel], Work())

    def release(self, fetched):
        pass


class KeepingTransport(InPlaceTransport):
    """Fetches a window that autograd may save."""

    access = Access.KEEP


class PoisonedPool(BufferPool):
    """Lends poisoned buffers, takes none back that an operation still fills, and poisons those that nobody may read.

    Autograd may read released ones to which it has references, unless `poisons_all`.
    """

    poisons_all = False

    def __init__(self, *allocate):
        super().__init__(*allocate)
        self.on_the_way = set()

    def acquire(self, numel, dtype):
        return poison(super().acquire(numel, dtype))

    def release(self, buffer):
        assert storage_address(buffer) not in self.on_the_way, "given back while being filled"
        if self.poisons_all or _references(buffer) <= _POOL_REFERENCES + 1:
            poison(buffer)
        super().release(buffer)


class Adversary(RecordingTransport):
    """Does everything as late as the interface allows, in any order, and notices what the interface forbids.

    Fetches happen at the end of their wait. Pushes let go of their buffer there, and reach the sums of the owners when
    they are flushed; an owner sees its sums after A, and before that poison.

    Attributes:
        fails: A kind of operation, "fetch" or "push", and an array: all of these fail from now on.
        delay_s: The time that a share of the operations, `share_delayed`, takes, in seconds.
        share_at_once: The share of the pushes that reach their owner, or make another one do so, before the flush.
    """

    fails = ("", "")
    delay_s, share_delayed, share_at_once = 0.001, 0.25, 0.2

    def reserve(self, plan):
        self.parameters.buffers = PoisonedPool()
        self.parameters.record_event = lambda buffer: self.buffers.on_the_way.add(storage_address(buffer))
        self._between_a_and_b = True
        self._pushes, self._rng = Delays(self.rank, share_at_once=self.share_at_once), random.Random(self.rank)
        super().reserve(plan)

    def open(self, close):
        self._sums = {index: shard.clone() for index, shard in self.gradients._shards.items()}
        super().open(close)

    def sums(self, index):
        return self._sums[index]

    def start_fetch(self, index, buffer):
        fill, address = super().start_fetch, storage_address(buffer)
        assert address in self.buffers.on_the_way, "fetched into a buffer without record_event"

        def arrive():
            try:
                self._begin("fetch", index)
                assert is_poisoned(buffer), "written to while it was filled"
                fill(index, buffer)
            finally:
                self.buffers.on_the_way.discard(address)

        return Work(arrive)

    def accumulate(self, index, gradient, start=0):
        borrowed, dtype = Borrowed(gradient), gradient.dtype

        def let_go():
            self._begin("push", index)
            self.log.append(("push", self.layouts[index].name))
            values = torch.from_numpy(borrowed.unchanged()).view(dtype)
            self._pushes.start(partial(LocalTransport.accumulate, self, index, values, start))

        return Work(let_go)

    def flush(self):
        self._pushes.complete()

    def gradients_complete(self, report):
        assert not self.buffers.on_the_way, "fetching while gradients are completed"
        assert not self._pushes.waiting, "came to A before its pushes were flushed"
        self._between_a_and_b = True
        return super().gradients_complete(report)

    def complete(self):
        assert self._between_a_and_b, "gradients were read before A"
        for index, sums in self._sums.items():
            self.gradients.shard(index).copy_(sums)
            sums.zero_()

    def parameters_published(self):
        assert not self.buffers.on_the_way, "fetching while parameters are published"
        shards = self.gradients._shards.values()
        assert not (self._between_a_and_b and any(map(torch.any, shards))), "came to B before gradients were cleared"
        super().parameters_published()
        for shard in shards:
            poison(shard)
        self._between_a_and_b = False

    def free(self, storages):
        assert not self.buffers.on_the_way, "fetching from windows that are freed"
        super().free(storages)

    def _begin(self, operation, index):
        if self._rng.random() < self.share_delayed:
            time.sleep(self.delay_s)
        if self.fails == (operation, self.layouts[index].name):
            raise ConnectionError(f"the {operation} went wrong")
        assert not self._between_a_and_b, f"a {operation} between A and B"


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

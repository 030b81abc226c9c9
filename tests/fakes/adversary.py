"""The adversary of all tests of communication: late, out of order, with poisoned buffers and borrowed memory.

Borrowed, Delays    what devices (`late_device.py`), windows and stores share
late                MPI windows
Adversary           a transport of N ranks in threads, for the engine
"""

import ctypes
import random
import threading
import time
import weakref
from functools import partial

import numpy as np
import torch
from ranks import LocalTransport, RecordingTransport
from torch.multiprocessing.reductions import StorageWeakRef

from odc_mpi.comm.buffers import _POOL_REFERENCES, BufferPool, _references, storage_address
from odc_mpi.comm.work import Work

#: A byte: memory full of it is NaN in every floating-point type.
POISON = 255


def poison(tensor):
    """Fill a contiguous tensor with what shows in every result, and return it."""
    with torch.inference_mode():  # it may have been made there
        tensor.view(torch.uint8).fill_(POISON)
    return tensor


def is_poisoned(tensor):
    return bool((tensor.view(torch.uint8) == POISON).all())


class Borrowed:
    """Memory of a caller until its operation is over, known by address: neither MPI nor a GPU keeps buffers alive."""

    def __init__(self, memory):
        self._gone = _expiry(memory)
        if isinstance(memory, torch.Tensor):
            self._address, self.size = memory.data_ptr(), memory.nbytes
        else:
            array = np.frombuffer(memory, dtype=np.uint8)
            self._address, self.size = array.ctypes.data, array.nbytes
        self._before = self.view().copy()

    def view(self):
        """Return the memory as bytes, if it is still there."""
        assert not self._gone(), "memory was let go of while it was on its way"
        return np.frombuffer((ctypes.c_uint8 * self.size).from_address(self._address), dtype=np.uint8)

    def unchanged(self):
        """Return the memory as bytes, if nobody has written to it."""
        assert np.array_equal(self.view(), self._before), "memory was written to while it was on its way"
        return self._before


def _expiry(memory):
    """Return a function that tells whether memory is gone, as far as one can know from its owner."""
    while isinstance(memory, np.ndarray) and memory.base is not None:
        memory = memory.base
    if isinstance(memory, torch.Tensor):
        return StorageWeakRef(memory.untyped_storage()).expired
    if isinstance(memory, memoryview):
        return lambda: False  # a view of an address
    reference = weakref.ref(memory)
    return lambda: reference() is None


class Delays:
    """Operations that were started: each is due at once or later, in an order that depends on the seed alone.

    Each is a function without arguments. One thread at a time may call `start` and `complete`.
    """

    def __init__(self, *seed, share_at_once=0.0):
        self.rng = np.random.default_rng(seed)
        self._share_at_once = share_at_once
        self.waiting = []

    def start(self, operation):
        self.waiting.append(operation)
        if self.rng.random() < self._share_at_once:
            self.waiting.pop(self.rng.integers(len(self.waiting)))()

    def complete(self):
        """Run what is waiting, and return it."""
        due, self.waiting = self.waiting, []
        for i in self.rng.permutation(len(due)):
            due[i]()
        return due


class Later:
    """A call of `operation` with memory that it has borrowed, until it is made or has let go of the memory."""

    def __init__(self, operation, memory, *arguments):
        self._operation, self._borrowed, self._arguments = operation, Borrowed(memory), arguments
        self._own = None
        self.size = self._borrowed.size

    def __call__(self):
        if self._own is None:
            self._borrowed.unchanged()
        self._operation(self._borrowed.view() if self._own is None else self._own, *self._arguments)

    def let_go(self):
        if self._own is None:
            self._own = self._borrowed.unchanged()


def late(kind):
    """Return a class of MPI windows that start nothing before it is flushed; what Gets will fill is poisoned.

    Until then what is read must stay. After `flush_local`, buffers may change, but nothing has reached its target.
    """

    class LateWindow(kind):
        flush_s = 0.0

        def __init__(self, world, *arguments, **options):
            self._delays, self._lock = Delays(world.rank), threading.RLock()
            super().__init__(world, *arguments, **options)

        def get_messages(self, buffer, parts, base=0):
            self._start(super().get_messages, buffer, parts, base, poisons=True)

        def put_messages(self, values, parts):
            self._start(super().put_messages, values, parts)

        def accumulate_messages(self, values, parts, base=0):
            self._start(super().accumulate_messages, values, parts, base)

        def flush(self, target=None):
            time.sleep(self.flush_s)
            with self._lock:
                started = self._delays.complete()  # with their memory, which MPI reads until they are flushed
            super().flush(target)
            del started

        def flush_local(self):
            with self._lock:
                for operation in self._delays.waiting:
                    operation.let_go()
            super().flush_local()

        def free(self):
            assert not self._delays.waiting, "something was started and never flushed"
            super().free()

        def _start(self, operation, memory, parts, *base, poisons=False):
            memory, itemsize = memoryview(memory).cast("B"), self.tensor.itemsize
            for target, start, (numel, first) in parts:
                part = memory[first * itemsize : (first + numel) * itemsize]
                if poisons:
                    np.frombuffer(part, dtype=np.uint8)[:] = POISON
                with self._lock:
                    self._delays.start(Later(operation, part, [(target, start, (numel, 0))], *base))

    return LateWindow


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

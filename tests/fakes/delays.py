"""What fakes of devices, windows and stores share: operations that are late, out of order, and borrow memory."""

import ctypes
import threading
import time
import weakref

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

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

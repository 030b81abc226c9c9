"""A device that is host memory on both sides: everything happens at the very end of the wait, and haste is noticed."""

import threading
import time

import torch

from odc_mpi.comm.kernels.native import add_segments_


class LateDevice:
    """Stands in for a GPU where what happens around one is tested without one.

    Attributes:
        copies: How many copies were started.
        additions: How many additions were started.
        copy_s: Seconds that each copy takes, and each addition.
        device_memory: Where memory of the device begins.
        registered: Where host memory begins that it may copy from.
        unfinished: The copies that nobody has waited for.
    """

    torch_device = torch.device("cpu")
    name = "late device"

    def __init__(self, copy_s=0.0005, can_register=True):
        self.can_register = can_register
        self.registered = []
        self.copies = 0
        self.unfinished = []
        self.additions = 0
        self.copy_s = copy_s
        self.device_memory = set()
        self._kernels = []
        self._lock = threading.Lock()

    def set_current(self):
        pass

    def free_bytes(self):
        return 1 << 30

    def empty(self, num_bytes):
        memory = torch.full((num_bytes,), 255, dtype=torch.uint8)  # NaN in every floating-point type
        self.device_memory.add(memory.data_ptr())
        return memory

    def empty_for_windows(self, num_bytes):
        return self.empty(num_bytes)

    def empty_pinned(self, num_bytes):
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def register(self, memory):
        if self.can_register:
            self.registered.append(memory.data_ptr())
        return self.can_register

    def unregister(self, memory):
        self.registered.remove(memory.data_ptr())

    def later(self, kernel):
        """Enqueue a computation, which runs when something waits for a later event."""
        with self._lock:
            self._kernels.append(kernel)

    def record_event(self):
        with self._lock:
            return LateEvent(self, len(self._kernels))

    def copy(self, destination, source, wait_for):
        assert isinstance(wait_for, LateEvent)
        assert destination.shape == source.shape and destination.dtype == source.dtype
        wait_for.synchronize()
        with self._lock:
            self.copies += 1
        return LateCopy(self, destination, source)

    def upload(self, source):
        """The computation is not late here: it gets the copy, whose source stays in use until somebody waits."""
        destination = self.empty(source.numel())
        copy = self.copy(destination, source, self.record_event())
        copy.deliver()
        return destination, copy

    def add_segments(self, shard, slots):
        assert all(values.dtype == shard.dtype for _, values in slots)
        with self._lock:
            self.additions += 1
        return LateAddition(self, shard, slots)

    def compute(self, count):
        """Work off the first so many kernels, each once and in order."""
        with self._lock:
            for i, kernel in enumerate(self._kernels[:count]):
                if kernel is not None:
                    kernel()
                    self._kernels[i] = None


class LateEvent:
    """An event after the enqueued kernels, which run when something waits for it, no sooner."""

    def __init__(self, device, count):
        self._device, self._count = device, count

    def synchronize(self):
        self._device.compute(self._count)


class LateCopy:
    """A copy that is on its way until it is waited for: by then neither side may have been touched."""

    def __init__(self, device, destination, source):
        self._device, self._destination, self._source = device, destination, source
        self._before = source.clone()
        self._delivered = False
        destination.view(torch.uint8).fill_(255)
        device.unfinished.append(self)

    def deliver(self):
        self._destination.copy_(self._source)
        self._delivered = True

    def synchronize(self):
        time.sleep(self._device.copy_s)
        same = torch.equal(self._source.view(torch.uint8), self._before.view(torch.uint8))
        assert same, "the source of a copy was written to before it was done"
        untouched = self._delivered or bool((self._destination.view(torch.uint8) == 255).all())
        assert untouched, "the target of a copy was touched meanwhile"
        if not self._delivered:
            self.deliver()
        self._device.unfinished.remove(self)


class LateAddition:
    """An addition that is on its way until it is waited for: by then no slot may have been touched."""

    def __init__(self, device, shard, slots):
        self._device, self._shard, self._slots = device, shard, slots
        self._before = [values.clone() for _, values in slots]

    def synchronize(self):
        time.sleep(self._device.copy_s)
        for (_, values), before in zip(self._slots, self._before, strict=True):
            same = torch.equal(values.view(torch.uint8), before.view(torch.uint8))
            assert same, "a slot was written to before it was added"
        # One stream: additions never overlap.
        with self._device._lock:
            add_segments_(self._shard, self._slots)

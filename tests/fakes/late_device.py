"""A device that is host memory on both sides: everything happens at the very end of the wait, and haste is noticed."""

import mmap
import os
import threading
import time
import weakref
from pathlib import Path

import torch
from adversary import POISON, Borrowed, is_poisoned, poison

from odc_mpi.comm.kernels.native import add_segments_


class LateDevice:
    """Stands in for a GPU; each copy and each addition takes `copy_s` seconds."""

    torch_device = torch.device("cpu")
    name = "late device"

    def __init__(self, copy_s=0.0005, can_register=True):
        self.copy_s, self.can_register = copy_s, can_register
        self.copies = self.additions = 0  # that were started
        self.device_memory, self.registered = set(), []  # addresses
        self._kernels = []
        self._in_flight = {"to device": [], "to host": [], "to peers": []}
        self._files = {}
        self._mapped = set()
        self._lock = threading.RLock()

    def set_current(self):
        pass

    def free_bytes(self):
        return 1 << 30

    def empty(self, num_bytes):
        memory = torch.full((num_bytes,), POISON, dtype=torch.uint8)
        self.device_memory.add(memory.data_ptr())
        return memory

    def empty_for_windows(self, num_bytes):
        """Memory that other processes can map: a file without a name."""
        file = os.memfd_create("late device")
        os.ftruncate(file, max(1, num_bytes))
        memory = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)[:num_bytes].fill_(POISON)
        self.device_memory.add(memory.data_ptr())
        self._files[memory.data_ptr()] = file
        weakref.finalize(memory.untyped_storage(), os.close, file)
        return memory

    def export(self, memory):
        return f"/proc/{os.getpid()}/fd/{self._files[memory.data_ptr()]}".encode()

    def map(self, handle, num_bytes):
        with Path(handle.decode()).open("r+b") as file:
            memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)[:num_bytes]
        self._mapped.add(memory.data_ptr())
        return memory

    def unmap(self, memory):
        self._mapped.remove(memory.data_ptr())

    def empty_pinned(self, num_bytes):
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

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
        to_device = destination.untyped_storage().data_ptr() in self.device_memory
        return self._start_copy("to device" if to_device else "to host", destination, source)

    def copy_to_peer(self, destination, source):
        assert destination.untyped_storage().data_ptr() in self._mapped
        return self._start_copy("to peers", destination, source)

    def _start_copy(self, stream, destination, source):
        with self._lock:
            self.copies += 1
            stream = self._in_flight[stream]
            for earlier in [copy for copy in stream if copy.fills(destination)]:
                self.complete(stream, earlier)  # copies of a stream are in order
            stream.append(LateCopy(self, stream, destination, source))
            return stream[-1]

    @property
    def unfinished(self):
        """The copies that were not waited for."""
        return [copy for stream in self._in_flight.values() for copy in stream]

    def finish_fetches(self):
        self.complete(self._in_flight["to device"])

    def complete(self, stream, last=None):
        """Complete the copies of a stream in order, up to `last`."""
        with self._lock:
            while stream and (last is None or last in stream):
                stream.pop(0).complete()

    def upload(self, source):
        """The computation is not late here: it gets the copy, whose source stays in use until a wait."""
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

    def __init__(self, device, stream, destination, source):
        self._device, self._stream, self._destination = device, stream, destination
        self._source, self._delivered = Borrowed(source), False
        poison(destination)

    def deliver(self):
        with torch.inference_mode():  # a thread's views are inference tensors
            self._destination.view(torch.uint8).copy_(torch.from_numpy(self._source.unchanged()))
        self._delivered = True

    def fills(self, memory):
        return self._destination.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()

    def synchronize(self):
        time.sleep(self._device.copy_s)
        self._device.complete(self._stream, self)

    #: A stream that waits uses the target at once, since kernels on the host do not run later.
    wait = synchronize

    def complete(self):
        self._source.unchanged()
        if not self._delivered:
            assert is_poisoned(self._destination), "the target of a copy was touched meanwhile"
            self.deliver()


class LateAddition:
    """An addition that is on its way until it is waited for: by then no slot may have been touched."""

    def __init__(self, device, shard, slots):
        self._device, self._shard, self._slots = device, shard, slots
        self._borrowed = [Borrowed(values) for _, values in slots]

    def synchronize(self):
        time.sleep(self._device.copy_s)
        for slot in self._borrowed:
            slot.unchanged()
        # One stream: additions never overlap.
        with self._device._lock:
            add_segments_(self._shard, self._slots)

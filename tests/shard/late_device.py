"""A device that is host memory on both sides: copies happen at the very end of the wait, and haste is noticed."""

import threading
import time

import torch


class LateDevice:
    """Stands in for a GPU where staging is tested without one.

    Attributes:
        copies: How many copies were started.
        copy_s: Seconds that each takes.
    """

    torch_device = torch.device("cpu")

    def __init__(self, copy_s=0.0005):
        self.copies = 0
        self.copy_s = copy_s
        self.device_memory = set()
        self._lock = threading.Lock()

    def memory(self, num_bytes):
        memory = torch.full((num_bytes,), 255, dtype=torch.uint8)  # NaN in every floating-point type
        self.device_memory.add(memory.data_ptr())
        return memory

    def pinned(self, num_bytes):
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def mark(self):
        return LateMark()

    def copy(self, destination, source, after):
        assert isinstance(after, LateMark)
        assert destination.shape == source.shape and destination.dtype == source.dtype
        with self._lock:
            self.copies += 1
        return LateCopy(self, destination, source)


class LateMark:
    """Behind what was computed: on the host that is done at once."""

    def synchronize(self):
        pass


class LateCopy:
    """A copy that is on its way until it is waited for: by then neither side may have been touched."""

    def __init__(self, device, destination, source):
        self._device, self._destination, self._source = device, destination, source
        self._before = source.clone()
        destination.view(torch.uint8).fill_(255)

    def synchronize(self):
        time.sleep(self._device.copy_s)
        same = torch.equal(self._source.view(torch.uint8), self._before.view(torch.uint8))
        assert same, "the source of a copy was written to before it was done"
        assert bool((self._destination.view(torch.uint8) == 255).all()), "the target of a copy was touched meanwhile"
        self._destination.copy_(self._source)

"""Pool of reusable buffers.

New memory costs a page fault per 4 KiB, and these page faults take longer than the copy that fills the memory. Autograd
or a user may still reference a buffer after its release, so the pool reuses a buffer only once no references are left.
"""

import threading
from collections.abc import Callable

import numpy as np
import torch


def empty_host(num_bytes: int) -> torch.Tensor:
    """Return an uninitialized uint8 tensor `[num_bytes]` in host memory."""
    return torch.empty(num_bytes, dtype=torch.uint8)


def copy_host(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a contiguous host tensor `[n]` to another of the same dtype and size, using only the calling thread.

    `Tensor.copy_` would start a team of OpenMP threads for each thread that calls it.
    """
    np.copyto(destination.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, which is the same for all views of a buffer."""
    return tensor.untyped_storage().data_ptr()


class BufferPool:
    """Thread-safe pool of reusable one-dimensional buffers.

    `allocate` takes a number of bytes and returns that much memory as a uint8 tensor.

    Attributes:
        peak_bytes: Peak memory use of the pool in bytes, including idle buffers.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor] = empty_host) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._idle: list[torch.Tensor] = []
        self._in_use: dict[int, torch.Tensor] = {}
        self._held_bytes = 0
        self.peak_bytes = 0

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized buffer with `numel` elements of `dtype`. Reuses an idle one if it is large enough."""
        num_bytes = max(1, numel) * dtype.itemsize
        with self._lock:
            block = self._pop_fitting(num_bytes)
            if block is None:
                self._free_unreferenced(num_bytes)
                block = self._allocate(num_bytes)
                self._held_bytes += num_bytes
                self.peak_bytes = max(self.peak_bytes, self._held_bytes)
            self._in_use[storage_address(block)] = block
        # Not a view of `block`: autograd would track it.
        return torch.empty(0, dtype=dtype, device=block.device).set_(block.untyped_storage(), 0, (numel,), (1,))

    def release(self, buffer: torch.Tensor) -> None:
        """Release a buffer that `acquire` returned. The pool does not reuse it while other tensors share its memory."""
        with self._lock:
            self._idle.append(self._in_use.pop(storage_address(buffer)))

    def clear(self) -> None:
        """Free all idle buffers."""
        with self._lock:
            self._held_bytes -= sum(block.numel() for block in self._idle)
            self._idle.clear()

    def _pop_fitting(self, num_bytes: int) -> torch.Tensor | None:
        """Remove and return the smallest idle buffer that is large enough and unreferenced."""
        fitting = [block for block in self._idle if block.numel() >= num_bytes and _is_unreferenced(block)]
        if not fitting:
            return None
        best = min(fitting, key=torch.Tensor.numel)
        self._idle = [block for block in self._idle if block is not best]
        return best

    def _free_unreferenced(self, num_bytes: int) -> None:
        """Free idle buffers, which are all too small, until `num_bytes` are freed, so that the pool does not grow."""
        for block in [block for block in self._idle if _is_unreferenced(block)]:
            if num_bytes <= 0:
                return
            self._idle = [other for other in self._idle if other is not block]
            self._held_bytes -= block.numel()
            num_bytes -= block.numel()


def _references(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _is_unreferenced(block: torch.Tensor) -> bool:
    return _references(block) <= _POOL_REFERENCES


#: Number of references to a storage held only by the pool. It is measured, because it depends on the torch version.
_POOL_REFERENCES = _references(torch.empty(1))

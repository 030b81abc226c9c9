"""Memory that fetches land in, used again and again.

Fresh memory costs a page fault per 4 KiB, which is slower than the copy that fills it, so a buffer goes back to the
pool instead of to the system. Autograd, or a user, may still hold a tensor that looks into a buffer when it is given
back. Such a buffer is set aside and used again only when nobody looks at it any more: a late reader never sees another
unit's parameters, at worst it costs memory.
"""

import threading
from collections.abc import Callable

import torch


def empty_host(num_bytes: int) -> torch.Tensor:
    """Return plain host memory, `[num_bytes]` uint8, its content undefined."""
    return torch.empty(num_bytes, dtype=torch.uint8)


class BufferPool:
    """Lends flat buffers and takes them back. Any thread may call it.

    Args:
        allocate: Makes memory of a number of bytes, as a uint8 tensor.

    Attributes:
        peak_bytes: The most memory that the pool ever held, lent or idle, in bytes.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor] = empty_host) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._idle: list[torch.Tensor] = []
        self._in_use: dict[int, torch.Tensor] = {}
        self._held_bytes = 0
        self.peak_bytes = 0

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Lend a buffer of `[numel]`, its content undefined."""
        num_bytes = max(1, numel) * dtype.itemsize
        with self._lock:
            block = self._pop_fitting(num_bytes)
            if block is None:
                self._free_unreferenced(num_bytes)
                block = self._allocate(num_bytes)
                self._held_bytes += num_bytes
                self.peak_bytes = max(self.peak_bytes, self._held_bytes)
            self._in_use[block.untyped_storage().data_ptr()] = block
        # Not a view of `whole`: autograd would track views, and two tensors over one storage are all that is meant.
        return torch.empty(0, dtype=dtype, device=block.device).set_(block.untyped_storage(), 0, (numel,), (1,))

    def release(self, buffer: torch.Tensor) -> None:
        """Take a lent buffer back."""
        with self._lock:
            self._idle.append(self._in_use.pop(buffer.untyped_storage().data_ptr()))

    def clear(self) -> None:
        """Let go of all idle buffers."""
        with self._lock:
            self._held_bytes -= sum(whole.numel() for whole in self._idle)
            self._idle.clear()

    def _pop_fitting(self, num_bytes: int) -> torch.Tensor | None:
        """Take the smallest idle buffer that is large enough and that nobody looks at."""
        fitting = [whole for whole in self._idle if whole.numel() >= num_bytes and _is_unreferenced(whole)]
        if not fitting:
            return None
        best = min(fitting, key=torch.Tensor.numel)
        self._idle = [whole for whole in self._idle if whole is not best]
        return best

    def _free_unreferenced(self, num_bytes: int) -> None:
        """Free idle buffers that are too small, to make room for so much: units of many sizes leave none behind."""
        for whole in [whole for whole in self._idle if _is_unreferenced(whole)]:
            if num_bytes <= 0:
                return
            self._idle = [other for other in self._idle if other is not whole]
            self._held_bytes -= whole.numel()
            num_bytes -= whole.numel()


def _is_unreferenced(block: torch.Tensor) -> bool:
    return _references(block) <= _POOL_REFERENCES


def _references(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


#: References to a storage at which only the pool looks. Counted, since torch's bookkeeping has changed before.
_POOL_REFERENCES = _references(torch.empty(1))

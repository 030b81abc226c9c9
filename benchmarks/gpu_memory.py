"""GPU memory of contenders that take turns in one process."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from odc_mpi.comm.device.device import Device


class Memory:
    """Peak bytes of each contender: of torch's allocator, and of the memory for windows, which CuPy allocates.

    Only memory that is allocated in `of(name)` belongs to a contender. CUDA's own memory does not count, which is about
    500 MB for each process. On the host all peaks are 0.

    Attributes:
        peaks: Peak bytes by contender.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._on_gpu = device.torch_device.type == "cuda"
        self._resident: Counter[str] = Counter()  # bytes between turns
        self._window_bytes = 0  # allocated so far, for all contenders
        self.peaks: dict[str, int] = {}

    @contextmanager
    def attribute_to(self, name: str) -> Iterator[None]:
        """Attribute all memory that is allocated and freed in the `with` block to a contender."""
        kind = type(self._device)
        allocate = kind.empty_for_windows

        def counted(device: Device, num_bytes: int) -> torch.Tensor:
            self._window_bytes += num_bytes
            return allocate(device, num_bytes)

        before, window_bytes = self._allocated(), self._window_bytes
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device.torch_device)
        with patch.object(kind, "empty_for_windows", counted):
            yield
        new = self._window_bytes - window_bytes
        peak = torch.cuda.max_memory_allocated(self._device.torch_device) - before if self._on_gpu else 0
        self.peaks[name] = max(self.peaks.get(name, 0), self._resident[name] + peak + new)
        self._resident[name] += self._allocated() - before + new

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device.torch_device) if self._on_gpu else 0

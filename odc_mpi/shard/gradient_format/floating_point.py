"""Gradients as floating-point numbers. Since sums are rounded, they depend on the order of their terms.

Note: sums that overflow
    A sum of finite gradients can be infinite. An owner knows whether its sum is finite only once the gradients are
    complete, and reporting this would require another collective. Instead, every rank reports an upper bound on what it
    adds to any array: the number of its pushes of the array times their largest magnitude. If the sum of all ranks'
    bounds may exceed the range of `reduce_dtype`, the gradients are treated as not finite. The magnitude of a local sum
    is computed only when it is pushed, because an element that has overflowed stays infinite or NaN.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from typing_extensions import override

from odc_mpi.comm.kernels.native import Segment, add_segments_, flatten, largest_magnitude
from odc_mpi.shard.gradient_format.base import GradientFormat
from odc_mpi.shard.optim import squared_norm


class FloatGradients(GradientFormat):
    """Gradient format that uses floating-point numbers of `dtype`, either torch.float32 or torch.float64."""

    def __init__(self, dtype: torch.dtype) -> None:
        # For each array, the largest magnitude in its pushes, and their number.
        self._largest: dict[int, torch.Tensor] = {}
        self._num_pushes: Counter[int] = Counter()
        # Half the range, because sums are rounded.
        self._limit = torch.finfo(dtype).max / 2

    @override
    def start(self) -> None:
        self._num_pushes.clear()
        if self._largest:
            torch._foreach_zero_(list(self._largest.values()))

    @override
    def write_flat(self, index: int, segments: Sequence[Segment], flat: torch.Tensor) -> None:
        flatten(segments, flat, self._largest_of(index, flat.device))

    @override
    def accumulate(self, index: int, segments: Sequence[Segment], flat: torch.Tensor) -> None:
        add_segments_(flat, segments)

    @override
    def note_push(self, index: int, flat: torch.Tensor) -> None:
        largest = self._largest_of(index, flat.device)
        torch.maximum(largest, largest_magnitude(flat), out=largest)

    def local_statistics(self) -> np.ndarray:
        """Return the largest bound on any array as a fraction of half the dtype's maximum, float64 `[1]`."""
        bounds = list(self.bounds().values())
        return np.array([float(torch.stack(bounds).max()) / self._limit if bounds else 0.0])

    @override
    def bounds(self) -> Mapping[int, torch.Tensor]:
        return {index: self._largest[index] * number for index, number in self._num_pushes.items()}

    @override
    def apply_global_statistics(self, totals: np.ndarray) -> bool:
        return bool(totals[0] < 1.0)

    @override
    def to_gradients(self, index: int, window: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return window.to(like.device, like.dtype, non_blocking=like.is_cuda)

    @override
    def sum_of_squares(self, gradients: Mapping[int, Sequence[torch.Tensor]]) -> np.ndarray:
        return np.array([squared_norm([own for slices in gradients.values() for own in slices])])

    @override
    def norm(self, totals: np.ndarray) -> float:
        return float(np.sqrt(totals[0]))

    def _largest_of(self, index: int, device: torch.device) -> torch.Tensor:
        """Count a push of array `index`, and return the scalar to raise to its largest magnitude, float64."""
        self._num_pushes[index] += 1
        if index not in self._largest:
            self._largest[index] = torch.zeros((), dtype=torch.float64, device=device)
        return self._largest[index]

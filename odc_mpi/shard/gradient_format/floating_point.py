"""Gradients as floating-point numbers, in fp32 or fp64: sums are rounded, so they depend on their order.

Note: sums that overflow
    Finite gradients of several pushes may have a sum that is not. Whether an owner's sum is finite it knows only after
    A, and to tell the others would take one more meeting. So every rank tells at A how large the sum of what it pushed
    may be in any element: of each array the largest elements of the pushes, added up. If all ranks' together may be
    beyond what `reduce_dtype` holds, the gradients count as not finite. A sum made at home is one push: what has
    overflowed stays infinite or NaN, however many gradients are added after it.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from typing_extensions import override

from odc_mpi.comm.kernels.native import Segment, add_segments_, flatten, largest_magnitude
from odc_mpi.shard.gradient_format.base import GradientFormat
from odc_mpi.shard.optim import squared_norm


class FloatGradients(GradientFormat):
    """Lays gradients out and adds them up in a type of torch's.

    Args:
        dtype: torch.float32 or torch.float64.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._bounds: dict[int, torch.Tensor] = {}
        # Half of what it holds: sums are rounded.
        self._limit = torch.finfo(dtype).max / 2

    @override
    def start(self) -> None:
        self._bounds = {}

    @override
    def write_flat(self, index: int, segments: Sequence[Segment], flat: torch.Tensor) -> None:
        self._add_bound(index, flatten(segments, flat))

    @override
    def accumulate(self, index: int, segments: Sequence[Segment], flat: torch.Tensor) -> None:
        add_segments_(flat, segments)

    @override
    def note_push(self, index: int, flat: torch.Tensor) -> None:
        self._add_bound(index, largest_magnitude(flat))

    def local_statistics(self) -> np.ndarray:
        """Return how much of the range of the type an element of what was pushed may take up, at most, `[1]`."""
        bounds = list(self._bounds.values())
        return np.array([float(torch.stack(bounds).max()) / self._limit if bounds else 0.0])

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

    def _add_bound(self, index: int, largest: torch.Tensor) -> None:
        self._bounds[index] = self._bounds[index] + largest if index in self._bounds else largest

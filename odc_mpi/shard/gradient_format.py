"""Number formats of gradients: their interface, and floating-point numbers (`shard.fixed_point` has another format).

Arrays are identified by their index in the transport. Since floating-point sums are rounded, they depend on the order
of their terms.

Note: sums that overflow
    A sum of finite gradients can be infinite. An owner knows whether its sum is finite only once the gradients are
    complete, and reporting this would require another collective. Instead, every rank reports an upper bound on its
    contribution to any array: its number of pushes of the array times their largest magnitude. If the sum of all ranks'
    bounds may exceed the range of `reduce_dtype`, the gradients are treated as not finite. The magnitude of a local sum
    is computed only when it is pushed, because an element that has overflowed stays infinite or NaN.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from typing_extensions import override

from odc_mpi.comm.kernels.native import Segment, add_segments_, flatten, largest_magnitude


class GradientFormat(ABC):
    """Number format in which gradients are pushed and summed."""

    @abstractmethod
    def start(self) -> None:
        """Begin a minibatch and discard the statistics of the previous one."""

    @abstractmethod
    def write_flat(self, index: int, segments: Sequence[Segment], flat: torch.Tensor) -> None:
        """Write the gradients of array `index` into the push buffer `flat`, and zeros into its other elements.

        Args:
            segments: Pairs of an offset in `flat` and the gradient, of any shape, to write there, sorted by offset.
            flat: Buffer, `[n]`, with the gradient store's dtype.
        """

    @abstractmethod
    def accumulate(self, index: int, segments: Sequence[Segment], flat: torch.Tensor) -> None:
        """Add the gradients of array `index` to the local sum `flat`. The arguments are the same as in `write_flat`."""

    def note_push(self, index: int, flat: torch.Tensor) -> None:  # noqa: B027 - optional
        """Record that the local sum `flat` of array `index` is about to be pushed."""

    @abstractmethod
    def local_statistics(self) -> np.ndarray:
        """Return numbers to sum over all ranks, float64 `[k]`, with the same k on all ranks. Waits for the device."""

    @abstractmethod
    def apply_global_statistics(self, totals: np.ndarray) -> bool:
        """Apply `totals`, the sums of `local_statistics` over all ranks. Return True if the gradients are finite."""

    @abstractmethod
    def to_gradients(self, index: int, window: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Convert `window`, `[n]`, this rank's gradient shard of array `index`, to the dtype and device of `like`.

        If no conversion is needed, the result may be `window` itself. Transfers to a GPU may be asynchronous.
        """

    def note_scaling(self, divisor: float) -> None:  # noqa: B027 - optional
        """Record that all gradients have been divided by `divisor`."""

    @abstractmethod
    def sum_of_squares(self, gradients: Mapping[int, Sequence[torch.Tensor]]) -> np.ndarray:
        """Return the numbers to sum over all ranks for `norm`, float64 `[k]`, with the same k on all ranks.

        `gradients` contains the gradients of this rank's slices, keyed by array index.
        """

    @abstractmethod
    def norm(self, totals: np.ndarray) -> float:
        """Compute the norm of all gradients from `totals`, float64 `[k]`, the sums of `sum_of_squares` over all ranks.

        The norm is NaN or infinite if a gradient is not finite.
        """

    @abstractmethod
    def bounds(self) -> Mapping[int, torch.Tensor]:
        """Return bounds on the sums of this rank's pushes since `start`, float64 scalars, keyed by array index.

        No element of the sum of an array's pushes has a larger magnitude. If a gradient is not finite, neither is the
        bound. Fixed-point numbers are bounded up to 2**18 times the usual bound.
        """


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
        gradient_slices = [gradient for slices in gradients.values() for gradient in slices]
        if not gradient_slices:
            return np.zeros(1)
        norms = torch.stack(torch._foreach_norm(gradient_slices, 2.0, dtype=torch.float64))
        return np.array([float(norms.square().sum())])

    @override
    def norm(self, totals: np.ndarray) -> float:
        return float(np.sqrt(totals[0]))

    def _largest_of(self, index: int, device: torch.device) -> torch.Tensor:
        """Count a push of array `index`. Return the largest magnitude, a float64 scalar for the caller to update."""
        self._num_pushes[index] += 1
        if index not in self._largest:
            self._largest[index] = torch.zeros((), dtype=torch.float64, device=device)
        return self._largest[index]

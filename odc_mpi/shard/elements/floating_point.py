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

from odc_mpi.comm.kernels.native import Piece, add_slots, flatten, largest_magnitude
from odc_mpi.shard.optim import squared_norm


class FloatingPoint:
    """Lays gradients out and adds them up in a type of torch's.

    Args:
        dtype: torch.float32 or torch.float64.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._bounds: dict[int, torch.Tensor] = {}
        # Half of what it holds: sums are rounded.
        self._limit = torch.finfo(dtype).max / 2

    def start(self) -> None:
        """Begin a minibatch. Local."""
        self._bounds = {}

    def lay_out(self, index: int, pieces: Sequence[Piece], flat: torch.Tensor) -> None:
        """Lay gradients of an array into a buffer that is pushed by itself, zeros between them. Local.

        Args:
            index: Of the array.
            pieces: Where in `flat` each gradient begins, and the gradient.
            flat: `[n]` of the elements' type; overwritten.
        """
        self._add_bound(index, flatten(pieces, flat))

    def add(self, index: int, pieces: Sequence[Piece], flat: torch.Tensor) -> None:
        """Add gradients of an array to a sum at home. Local; arguments as of `lay_out`."""
        add_slots(flat, pieces)

    def send(self, index: int, flat: torch.Tensor) -> None:
        """Take note of a sum at home that is pushed now. Local."""
        self._add_bound(index, largest_magnitude(flat))

    def tell(self) -> np.ndarray:
        """Return this rank's numbers for point A, float64 `[1]`. Local; waits for the device.

        How much of the range of the type an element of what was pushed may take up, at most.
        """
        bounds = list(self._bounds.values())
        return np.array([float(torch.stack(bounds).max()) / self._limit if bounds else 0.0])

    def hear(self, totals: np.ndarray) -> bool:
        """Take the sums over all ranks of what they told; return whether the gradients are finite. Local."""
        return bool(totals[0] < 1.0)

    def read(self, index: int, window: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's gradients of an array as an optimizer takes them. Local.

        Args:
            index: Of the array.
            window: The gradient shard, `[n]`.
            like: Has the device and the type that the optimizer takes.

        Returns:
            The window itself where nothing is to be changed. Nobody waits for a transfer to a GPU.
        """
        return window.to(like.device, like.dtype, non_blocking=like.is_cuda)

    def divide(self, divisor: float) -> None:
        """Take note that all gradients are divided by a number. Local."""

    def squares(self, gradients: Mapping[int, Sequence[torch.Tensor]]) -> np.ndarray:
        """Return the sum of the squares of this rank's gradients, float64 `[1]`. Local.

        Args:
            gradients: Of this rank's slices, by the indices of their arrays.
        """
        return np.array([squared_norm([own for slices in gradients.values() for own in slices])])

    def norm(self, totals: np.ndarray) -> float:
        """Return the norm, of the sum over all ranks of `squares`. Local."""
        return float(np.sqrt(totals[0]))

    def _add_bound(self, index: int, largest: torch.Tensor) -> None:
        self._bounds[index] = self._bounds[index] + largest if index in self._bounds else largest

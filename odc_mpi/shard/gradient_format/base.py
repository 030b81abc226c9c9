"""`GradientFormat`: the numbers that gradients are pushed and added up as.

    start              as a minibatch begins
    lay_out, add       in the backward: into a buffer that is pushed by itself, or to a sum at home
    send               a sum at home is pushed
    tell, hear         at A: numbers of this rank, and the sums over all ranks
    read               after A: this rank's gradients, as an optimizer takes them
    divide             gradients are divided by a number
    squares, norm      at N: squares of this rank's gradients, and the norm from the sums over all ranks

Called in this order. Arrays are known by their indices.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from odc_mpi.comm.kernels.native import Segment


class GradientFormat(ABC):
    """Lays gradients out and adds them up."""

    @abstractmethod
    def start(self) -> None:
        """Begin a minibatch."""

    @abstractmethod
    def write_flat(self, index: int, segments: Sequence[Segment], flat: torch.Tensor) -> None:
        """Lay gradients of an array into a buffer that is pushed by itself, zeros between them.

        Args:
            index: Of the array.
            segments: Where in `flat` each gradient begins, and the gradient.
            flat: `[n]` of the elements' type; overwritten.
        """

    @abstractmethod
    def accumulate(self, index: int, segments: Sequence[Segment], flat: torch.Tensor) -> None:
        """Add gradients of an array to a sum at home. Local; arguments as of `write_flat`."""

    def note_push(self, index: int, flat: torch.Tensor) -> None:  # noqa: B027 - not everybody has to
        """Take note of a sum at home that is pushed now."""

    @abstractmethod
    def local_statistics(self) -> np.ndarray:
        """Return this rank's numbers for point A, float64 `[k]`, as many on each rank. Local; waits for the device."""

    @abstractmethod
    def apply_global_statistics(self, totals: np.ndarray) -> bool:
        """Take the sums over all ranks of what they told; return whether the gradients are finite."""

    @abstractmethod
    def to_gradients(self, index: int, window: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's gradients of an array as an optimizer takes them. Local, after `hear`.

        Args:
            index: Of the array.
            window: The gradient shard, `[n]` of the elements' type.
            like: Has the device and the type that the optimizer takes.

        Returns:
            `[n]`; the window itself where nothing is to be changed. Nobody waits for a transfer to a GPU.
        """

    def note_scaling(self, divisor: float) -> None:  # noqa: B027 - not everybody has to
        """Take note that all gradients are divided by a number."""

    @abstractmethod
    def sum_of_squares(self, gradients: Mapping[int, Sequence[torch.Tensor]]) -> np.ndarray:
        """Return sums over the squares of this rank's gradients, float64 `[k]`, as many on each rank.

        Args:
            gradients: Of this rank's slices, by the indices of their arrays.
        """

    @abstractmethod
    def norm(self, totals: np.ndarray) -> float:
        """Return the norm, of the sum over all ranks of `sum_of_squares`; NaN if gradients are not finite."""

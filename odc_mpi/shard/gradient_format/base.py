"""Interface of the number formats of gradients.

Methods are called in this order; arrays are identified by their index in the transport:

    start                                       at the beginning of a minibatch
    write_flat, accumulate                      in a backward pass: write gradients to a push buffer, or add to a sum
    note_push                                   before a local sum is pushed
    local_statistics, apply_global_statistics   gradients complete: numbers of this rank, and their sums over all ranks
    to_gradients                                afterwards: convert the gradients of this rank for the optimizer
    note_scaling                                after all gradients are divided by a number
    sum_of_squares, norm                        gradient norm: squares of this rank, and the norm over all ranks
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from odc_mpi.comm.kernels.native import Segment


class GradientFormat(ABC):
    """Number format in which gradients are pushed and summed."""

    @abstractmethod
    def start(self) -> None:
        """Begin a minibatch, and discard the statistics of the previous minibatch."""

    @abstractmethod
    def write_flat(self, index: int, segments: Sequence[Segment], flat: torch.Tensor) -> None:
        """Write gradients of array `index` to the buffer `flat`, and zeros to all other elements of the buffer.

        Args:
            index: Index of the array in the transport.
            segments: Pairs of an offset in `flat` and the gradient to write there, in ascending order of the offsets.
            flat: Buffer `[n]` with the dtype of the gradient store.
        """

    @abstractmethod
    def accumulate(self, index: int, segments: Sequence[Segment], flat: torch.Tensor) -> None:
        """Add gradients of array `index` to the local sum `flat`. The arguments are those of `write_flat`."""

    def note_push(self, index: int, flat: torch.Tensor) -> None:  # noqa: B027 - optional
        """Record that the local sum `flat` of array `index` is about to be pushed."""

    @abstractmethod
    def local_statistics(self) -> np.ndarray:
        """Return numbers of this rank that will be summed over all ranks, float64 `[k]`, with the same k on all ranks.

        This call waits for the device.
        """

    @abstractmethod
    def bounds(self) -> Mapping[int, torch.Tensor]:
        """Return a scaled bound of the gradients of each pushed array, by index. Not finite if a gradient is not."""

    @abstractmethod
    def apply_global_statistics(self, totals: np.ndarray) -> bool:
        """Apply `totals`, the sums of `local_statistics` over all ranks. Returns True if the gradients are finite."""

    @abstractmethod
    def to_gradients(self, index: int, window: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Convert `window`, this rank's gradient shard of array `index`, `[n]`, to the dtype and device of `like`.

        The result may be `window` itself if no conversion is needed. A transfer to a GPU may be asynchronous.
        """

    def note_scaling(self, divisor: float) -> None:  # noqa: B027 - optional
        """Record that all gradients were divided by `divisor`."""

    @abstractmethod
    def sum_of_squares(self, gradients: Mapping[int, Sequence[torch.Tensor]]) -> np.ndarray:
        """Return sums of the squares of this rank's gradients, float64 `[k]`, with the same k on all ranks.

        `gradients` contains the gradients of this rank's slices, by the index of the array.
        """

    @abstractmethod
    def norm(self, totals: np.ndarray) -> float:
        """Compute the norm of all gradients from `totals`, the sums of `sum_of_squares` over all ranks, float64 `[k]`.

        The norm is NaN or infinite if a gradient is not finite.
        """

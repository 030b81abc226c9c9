"""Interface for the number formats of gradients.

Arrays are identified by their index in the transport.
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
        """Begin a minibatch and discard the statistics of the previous one."""

    @abstractmethod
    def write_flat(self, index: int, segments: Sequence[Segment], flat: torch.Tensor) -> None:
        """Write gradients of array `index` to the push buffer `flat`, and zeros to all other elements of the buffer.

        Args:
            segments: Pairs of an offset in `flat` and a gradient of any shape to write there, by ascending offset.
            flat: Buffer, `[n]` of the gradient store's dtype.
        """

    @abstractmethod
    def accumulate(self, index: int, segments: Sequence[Segment], flat: torch.Tensor) -> None:
        """Add gradients of array `index` to the local sum `flat`. Takes the same arguments as `write_flat`."""

    def note_push(self, index: int, flat: torch.Tensor) -> None:  # noqa: B027 - optional
        """Record that the local sum `flat` of array `index` is about to be pushed."""

    @abstractmethod
    def local_statistics(self) -> np.ndarray:
        """Return numbers to be summed over all ranks, float64 `[k]`, with the same k on all ranks.

        This call waits for the device.
        """

    @abstractmethod
    def apply_global_statistics(self, totals: np.ndarray) -> bool:
        """Apply `totals`, the sums of `local_statistics` over all ranks. Return True if the gradients are finite."""

    @abstractmethod
    def to_gradients(self, index: int, window: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Convert `window`, this rank's gradient shard `[n]` of array `index`, to the dtype and device of `like`.

        If no conversion is needed, the result may be `window` itself. Transfers to a GPU may be asynchronous.
        """

    def note_scaling(self, divisor: float) -> None:  # noqa: B027 - optional
        """Record that all gradients have been divided by `divisor`."""

    @abstractmethod
    def sum_of_squares(self, gradients: Mapping[int, Sequence[torch.Tensor]]) -> np.ndarray:
        """Return numbers to be summed over all ranks for `norm`, float64 `[k]`, with the same k on all ranks.

        `gradients` contains the gradients of this rank's slices, by array index.
        """

    @abstractmethod
    def norm(self, totals: np.ndarray) -> float:
        """Compute the norm of all gradients from `totals`, the sums of `sum_of_squares` over all ranks, float64 `[k]`.

        The norm is NaN or infinite if a gradient is not finite.
        """

    @abstractmethod
    def bounds(self) -> Mapping[int, torch.Tensor]:
        """Return a scaled bound on this rank's pushes of each array, by index. Not finite if a gradient is not."""

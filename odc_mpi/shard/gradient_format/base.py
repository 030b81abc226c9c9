"""Interface of the number formats of gradients.

Methods are called in this order; arrays are identified by their index in the transport:

    start                                       a minibatch begins
    write_flat, accumulate                      backward: into a buffer that is pushed, or into a local sum
    note_push                                   a local sum is pushed
    local_statistics, apply_global_statistics   gradients complete: numbers of this rank, and their sums over all ranks
    to_gradients                                then: gradients of this rank for the optimizer
    note_scaling                                gradients are divided by a number
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
        """Begin a minibatch."""

    @abstractmethod
    def write_flat(self, index: int, segments: Sequence[Segment], flat: torch.Tensor) -> None:
        """Overwrite the buffer `flat` with gradients of an array, and with zeros between them.

        A segment is the index in `flat` of the first element, and the gradient. `flat` has the dtype of the store.
        """

    @abstractmethod
    def accumulate(self, index: int, segments: Sequence[Segment], flat: torch.Tensor) -> None:
        """Add gradients of an array to the local sum `flat`. Arguments as of `write_flat`."""

    def note_push(self, index: int, flat: torch.Tensor) -> None:  # noqa: B027 - optional
        """Record that a local sum is pushed."""

    @abstractmethod
    def local_statistics(self) -> np.ndarray:
        """Return numbers to sum over the ranks, float64 `[k]`, with the same k on all ranks. Waits for the device."""

    @abstractmethod
    def apply_global_statistics(self, totals: np.ndarray) -> bool:
        """Apply the sums over all ranks of `local_statistics`. Return whether the gradients are finite."""

    @abstractmethod
    def to_gradients(self, index: int, window: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Convert this rank's gradient shard of an array, `[n]`, to the dtype and device of `like`.

        Returns `window` itself if it needs no conversion. A transfer to a GPU is asynchronous.
        """

    def note_scaling(self, divisor: float) -> None:  # noqa: B027 - optional
        """Record that all gradients are divided by a number."""

    @abstractmethod
    def sum_of_squares(self, gradients: Mapping[int, Sequence[torch.Tensor]]) -> np.ndarray:
        """Return sums of squares of this rank's slices, by array, float64 `[k]`, with the same k on all ranks."""

    @abstractmethod
    def norm(self, totals: np.ndarray) -> float:
        """Return the norm, from the sum over all ranks of `sum_of_squares`. NaN if the gradients are not finite."""

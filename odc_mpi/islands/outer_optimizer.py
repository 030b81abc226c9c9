"""Outer optimizer: the outer parameters, and their update from the mean difference of the islands' parameters.

    difference   D_k = outer - local       of island k, when a fragment is sent
    mean         D = sum of w_k D_k        the weights w_k sum to 1
    apply        v = momentum v + D        Nesterov momentum, as in torch.optim.SGD
                 outer -= learning_rate (D + momentum v)
                 local = outer + local_share (local - outer)

This is DiLoCo (arXiv 2311.08105), and with several fragments and a delay Streaming DiLoCo (arXiv 2501.18512).

Each operation rounds on its own, and none adds a product, which some processors round once and others twice. Islands
therefore compute bitwise identical outer parameters, whatever their processors and numbers of threads and ranks.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from odc_mpi.islands.encoding import Encoding
from odc_mpi.islands.fragments import Fragment


class Contributions(NamedTuple):
    """Contributions of all islands to a fragment, decoded on this rank.

    Attributes:
        mean: Weighted mean of the differences, fp32 `[fragment.num_elements]`.
        squares: Sum of squares of this rank's part of each island's difference, then of the mean.
    """

    mean: torch.Tensor
    squares: list[float]


class OuterOptimizer:
    """Outer parameters and momentum for this rank's slices. Does not communicate.

    Args:
        slices: This rank's slices of the trainable parameters, fp32 or fp64, which `apply` changes. The outer
            parameters start with their values.
        local_share: Share of the local parameters in those that an island goes on with, from 0 to 1.
        error_feedback: True to add what encoding has lost from a difference to the next one of the fragment.
    """

    def __init__(
        self,
        slices: Sequence[nn.Parameter],
        fragments: Sequence[Fragment],
        encoding: Encoding,
        *,
        learning_rate: float,
        momentum: float,
        local_share: float = 0.0,
        error_feedback: bool = False,
    ) -> None:
        self._slices = [each.detach() for each in slices]
        self._fragments, self._encoding = fragments, encoding
        self._learning_rate, self._momentum, self._local_share = learning_rate, momentum, local_share
        self._outer = [fragment.read(self._slices) for fragment in fragments]
        self._velocities = [torch.zeros_like(outer) for outer in self._outer]
        self._residuals = [torch.zeros_like(outer) for outer in self._outer] if error_feedback else None

    def encode(self, index: int) -> torch.Tensor:
        """Return the encoded difference of a fragment, `[n]` uint8, and update the residual."""
        difference = self._outer[index] - self._fragments[index].read(self._slices)
        if self._residuals is not None:
            difference += self._residuals[index]
        message = torch.empty(self._encoding.num_bytes(difference.numel()), dtype=torch.uint8, device=difference.device)
        self._encoding.encode(difference, message)
        if self._residuals is not None:
            lost = difference - self._decode(index, message)
            # Not finite only after a fault, from which the next difference must be free.
            self._residuals[index] = torch.where(lost.isfinite(), lost, 0.0)
        return message

    def combine(self, index: int, messages: torch.Tensor, weights: Sequence[float]) -> Contributions:
        """Decode the messages of all islands, `[islands, n]` uint8, and return their mean with these weights."""
        mean, squares = torch.zeros_like(self._outer[index]), []
        for message, weight in zip(messages.to(mean.device), weights, strict=True):
            difference = self._decode(index, message)
            squares.append(_sum_of_squares(difference))
            if weight:
                mean += difference * weight
        return Contributions(mean, [*squares, _sum_of_squares(mean)])

    def apply(self, index: int, mean: torch.Tensor | None) -> None:
        """Update the outer parameters of a fragment with the mean difference, if any, and set the local ones."""
        outer, velocity = self._outer[index], self._velocities[index]
        if mean is not None:
            velocity.mul_(self._momentum).add_(mean)
            outer.sub_(velocity.mul(self._momentum).add_(mean).mul_(self._learning_rate))
        local = outer
        if self._local_share:
            local = self._fragments[index].read(self._slices).sub_(outer).mul_(self._local_share).add_(outer)
        self._fragments[index].write(local, self._slices)

    def outer_parameters(self) -> list[torch.Tensor]:
        """Return copies of the outer parameters, shaped like the slices."""
        return self._to_slices(self._outer)

    def momentum(self) -> list[torch.Tensor]:
        """Return copies of the momentum, shaped like the slices."""
        return self._to_slices(self._velocities)

    def residuals(self) -> list[torch.Tensor] | None:
        """Return copies of the residuals, shaped like the slices, or None without error feedback."""
        return None if self._residuals is None else self._to_slices(self._residuals)

    def spread(self, index: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return tensors shaped like the slices that hold a flat buffer of one fragment, and zeros elsewhere."""
        slices = [torch.zeros_like(each, dtype=torch.float32) for each in self._slices]
        self._fragments[index].write(flat, slices)
        return slices

    def collect(self, index: int, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the flat buffer of one fragment from tensors shaped like the slices."""
        return self._fragments[index].read(slices)

    def load(
        self,
        outer: Sequence[torch.Tensor],
        momentum: Sequence[torch.Tensor] | None,
        residuals: Sequence[torch.Tensor] | None,
    ) -> None:
        """Restore the state from tensors shaped like the slices. None stands for zeros."""
        for target, source in ((self._outer, outer), (self._velocities, momentum), (self._residuals, residuals)):
            if target is not None:
                for fragment, flat in zip(self._fragments, target, strict=True):
                    flat.copy_(fragment.read(source)) if source is not None else flat.zero_()

    def _to_slices(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        slices = [torch.empty_like(each, dtype=torch.float32) for each in self._slices]
        for fragment, flat in zip(self._fragments, flats, strict=True):
            fragment.write(flat, slices)
        return slices

    def _decode(self, index: int, message: torch.Tensor) -> torch.Tensor:
        difference = torch.empty_like(self._outer[index])
        self._encoding.decode(message, difference)
        return difference


def _sum_of_squares(flat: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64).square())


def normalized(weights: Sequence[float], excluded: Mapping[int, float]) -> list[float]:
    """Return the weights of the islands that are not excluded divided by their sum, or zeros if it is 0."""
    kept = [0.0 if island in excluded else weight for island, weight in enumerate(weights)]
    total = sum(kept)
    return [weight / total for weight in kept] if total else kept

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

from collections.abc import Sequence

import torch
from torch import nn

from odc_mpi.islands.encoding import Encoding
from odc_mpi.islands.fragments import Fragment
from odc_mpi.islands.topk import TopK

#: Number of elements that are converted to fp64 at a time.
_PART_NUMEL = 1 << 15


class OuterOptimizer:
    """Outer parameters and momentum for this rank's slices of the trainable parameters. Does not communicate.

    Args:
        slices: This rank's slices, which `apply` changes. The outer parameters are initialized with their values.
        local_share: `apply` sets the local parameters to `local_share * local + (1 - local_share) * outer`.
        error_feedback: True to add the rounding errors of an encoded difference to the fragment's next difference.

    Attributes:
        outer, velocities: Outer parameters and momentum, fp32, shaped like the slices.
        message_bytes: Size in bytes of each fragment's encoded difference.
        residuals: Rounding errors of the latest differences, fp32, shaped like the slices; None without error feedback.
    """

    def __init__(
        self,
        slices: Sequence[nn.Parameter],
        fragments: Sequence[Fragment],
        encoding: Encoding | TopK,
        *,
        learning_rate: float,
        momentum: float,
        local_share: float = 0.0,
        error_feedback: bool = False,
    ) -> None:
        self._slices = [each.detach() for each in slices]
        self._fragments, self._encoding = fragments, encoding
        self.message_bytes = [encoding.num_bytes(each.num_elements) for each in fragments]
        self._learning_rate, self._momentum, self._local_share = learning_rate, momentum, local_share
        self.outer = [each.to(torch.float32, copy=True) for each in self._slices]
        self.velocities = [torch.zeros_like(each) for each in self.outer]
        self.residuals = [torch.zeros_like(each) for each in self.outer] if error_feedback else None
        self._former_residual = torch.empty(0)

    def encode(self, index: int) -> torch.Tensor:
        """Return a fragment's encoded difference, uint8 `[n]`, and update its residuals."""
        fragment = self._fragments[index]
        difference = fragment.read(self.outer).sub_(fragment.read(self._slices))
        if self.residuals is not None:
            difference += fragment.read(self.residuals)
        message = torch.empty(self.message_bytes[index], dtype=torch.uint8, device=difference.device)
        self._encoding.encode(difference, message)
        if self.residuals is not None:
            self._former_residual = fragment.read(self.residuals)
            lost = difference - self._decode(index, message)
            # Not finite only after a fault, from which the next difference must be free.
            fragment.write(torch.where(lost.isfinite(), lost, 0.0), self.residuals)
        return message

    def combine(self, index: int, messages: torch.Tensor, weights: Sequence[float]) -> tuple[torch.Tensor, list[float]]:
        """Decode the differences of all islands, and compute their weighted mean.

        Args:
            messages: Encoded difference of each island, uint8 `[islands, n]`.
            weights: Weight of each island.

        Returns:
            The mean, fp32 `[fragment.num_elements]`, and a list of sums of squares of this rank's elements: one sum for
            each island's difference, followed by one for the mean.
        """
        messages = messages.to(self.outer[0].device)
        mean, squares = torch.zeros(self._fragments[index].num_elements, device=messages.device), []
        for message, weight in zip(messages, weights, strict=True):
            difference = self._decode(index, message)
            squares.append(_sum_of_squares(difference))
            if weight:
                mean += difference.mul_(weight)
        return mean, [*squares, _sum_of_squares(mean)]

    def apply(self, index: int, mean: torch.Tensor | None, *, keep_local: bool = True) -> None:
        """Update a fragment's outer parameters with the mean difference, and then its local parameters.

        If `mean` is None, because no island has contributed, the outer parameters and the momentum do not change. If
        `keep_local` is False, the local parameters are set to the outer ones, regardless of the local share.
        """
        fragment = self._fragments[index]
        outer, velocity = fragment.read(self.outer), fragment.read(self.velocities)
        if mean is not None:
            velocity.mul_(self._momentum).add_(mean)
            fragment.write(velocity, self.velocities)
            outer.sub_(velocity.mul_(self._momentum).add_(mean).mul_(self._learning_rate))
            fragment.write(outer, self.outer)
        if self._local_share and keep_local:
            outer.add_(fragment.read(self._slices).sub_(outer).mul_(self._local_share))
        fragment.write(outer, self._slices)

    def average(self, index: int, mean: torch.Tensor) -> None:
        """Set a fragment's outer and local parameters to the mean of all islands' local parameters, `outer - mean`."""
        fragment = self._fragments[index]
        outer = fragment.read(self.outer).sub_(mean)
        fragment.write(outer, self.outer)
        fragment.write(outer, self._slices)

    def take_back(self, index: int) -> None:
        """Undo the latest `encode`, of a difference that did not enter the merge."""
        if self.residuals is not None:
            self._fragments[index].write(self._former_residual, self.residuals)

    def catch_up(self, outer: Sequence[torch.Tensor], velocities: Sequence[torch.Tensor]) -> None:
        """Set the outer parameters and the momentum, and keep the differences from the local parameters."""
        for mine, new, local in zip(self.outer, outer, self._slices, strict=True):
            local.add_(new.to(mine.device) - mine)
            mine.copy_(new)
        for mine, new in zip(self.velocities, velocities, strict=True):
            mine.copy_(new)

    def checksum(self, index: int) -> int:
        """Return a checksum, below 2**50, of the bits of a fragment's outer parameters and momentum."""
        fragment = self._fragments[index]
        flats = torch.cat([fragment.read(self.outer), fragment.read(self.velocities)])
        return int(flats.view(torch.int32).sum(dtype=torch.int64)) % 2**50

    def _decode(self, index: int, message: torch.Tensor) -> torch.Tensor:
        difference = torch.empty(self._fragments[index].num_elements, device=message.device)
        self._encoding.decode(message, difference)
        return difference


def _sum_of_squares(flat: torch.Tensor) -> float:
    # In parts, which stay in a core's cache: torch converts its input to fp64.
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in flat.split(_PART_NUMEL)]
    return float(torch.stack(norms).square().sum()) if norms else 0.0


def normalized(weights: Sequence[float]) -> list[float]:
    """Return the weights, scaled to sum to 1. If all are 0, return zeros."""
    total = sum(weights)
    return [weight / total for weight in weights] if total else list(weights)

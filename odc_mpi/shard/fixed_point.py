"""Gradients as 64-bit fixed-point numbers. Since these are integers, their sums do not depend on the order of terms.

A gradient is multiplied by 2**exponent, where each array has its own exponent, and rounded to the nearest integer (ties
to even). The integers are summed locally and by pushes, and the owner converts the sum back to floating-point numbers.

All numbers that the ranks exchange are sums, over pushes or elements, of integers that float64 represents exactly.
Neither these sums nor the exponents depend on which rank ran which microbatch or on where the shards begin and end.

Note: exponents
    For each push of an array, a rank computes an upper bound on the largest element. All ranks receive the sum of these
    bounds, which no element of a complete or partial sum of the pushes exceeds. If it is at most 2**62, no sum
    overflows. Otherwise the gradients are treated as not finite: the step is skipped and the exponent is lowered, as
    with a loss scale. The next exponent leaves 10 bits of headroom above this minibatch's bound, and 52 bits below it.
    From one minibatch to the next, an exponent may fall by any amount but rises by at most 8.

Note: the norm
    Each square is split into four integers, the first of which is scaled by the array's known bound. If the array has
    up to 2**b elements, each integer has `52 - b` bits, so its sum over all elements stays below 2**53.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from typing_extensions import override

from odc_mpi.comm.kernels.native import Segment, largest_magnitude
from odc_mpi.shard.gradient_format import GradientFormat

#: Sums must not exceed 2**SUM_BITS.
SUM_BITS = 62
#: The next minibatch's gradients may be larger by a factor of up to 2**HEADROOM_BITS.
HEADROOM_BITS = 10
#: Exponent in the first minibatch, which allows sums up to 2**14 in steps of 2**-48.
FIRST_EXPONENT = 48
#: Maximum increase of an exponent from one minibatch to the next.
MAX_RISE = 8
#: Minimum and maximum exponents, between which all scales are normal fp64 numbers.
EXPONENTS = (-900, 900)
#: Bounds are reported in multiples of 2**BOUND_BITS.
BOUND_BITS = 30
#: Largest bound that is reported, in multiples of 2**BOUND_BITS. A sum of 2**13 such numbers is exact.
MAX_BOUND = 2.0**40
#: Rounding errors are reported in multiples of 2**ERROR_BITS, where 1 is one integer step.
ERROR_BITS = -6
#: Rounding errors are measured in one out of this many parts of a gradient.
PARTS_PER_MEASUREMENT = 8
#: Number of integers into which a square is split.
LIMBS = 4
#: Number of bits up to which float64 sums of integers are exact. One more bit is reserved for rounding up.
EXACT_BITS = 52
#: Number of elements that are processed at a time. On a host, they stay in a core's cache.
_HOST_NUMEL, _DEVICE_NUMEL = 1 << 15, 1 << 22


class FixedPointGradients(GradientFormat):
    """Gradient format that uses 64-bit fixed-point numbers.

    Args:
        numels: Number of elements in each trainable array, keyed by array index, in the same order on all ranks.

    Attributes:
        relative_error: Ratio of the total magnitude of all pushes' rounding errors to that of the gradients in the
            last minibatch with finite gradients, or 0 if nothing was pushed. For large gradients, both totals are
            estimated from one eighth of the elements. The ratio does not depend on the number of ranks.
    """

    def __init__(self, numels: Mapping[int, int]) -> None:
        self._numels = dict(numels)
        self.exponents = dict.fromkeys(numels, FIRST_EXPONENT)
        self.relative_error = 0.0
        # Exponents of this minibatch's pushes and their sums, and bounds on the elements of the sums.
        self._received: dict[int, int] = {}
        self._finite = True
        self._largest: dict[int, float] = {}
        # Bound, error and magnitude of each array's pushes.
        self._statistics: dict[int, torch.Tensor] = {}
        self._work: torch.Tensor | None = None

    @override
    def start(self) -> None:
        self._statistics = {}
        self._received = dict(self.exponents)

    @override
    def write_flat(self, index: int, segments: Sequence[Segment], flat: torch.Tensor) -> None:
        filled = 0
        for start, gradient in segments:
            flat[filled:start].zero_()
            filled = start + gradient.numel()
        flat[filled:].zero_()
        self._round(index, segments, flat, torch.Tensor.copy_)

    @override
    def accumulate(self, index: int, segments: Sequence[Segment], flat: torch.Tensor) -> None:
        self._round(index, segments, flat, lambda target, rounded: target.add_(rounded.to(torch.int64)))

    @override
    def local_statistics(self) -> np.ndarray:
        nothing = torch.zeros(3, dtype=torch.float64)
        return np.array([self._statistics.get(index, nothing).cpu().numpy() for index in self._numels]).ravel()

    @override
    def bounds(self) -> Mapping[int, torch.Tensor]:
        return {
            index: statistics[0] * 2.0 ** (BOUND_BITS - self._received[index])
            for index, statistics in self._statistics.items()
        }

    @override
    def apply_global_statistics(self, totals: np.ndarray) -> bool:
        rows = dict(zip(self._numels, totals.reshape(-1, 3).tolist(), strict=True))
        steps = {index: 2.0 ** -self.exponents[index] for index in rows}
        self._largest = {index: row[0] * 2.0**BOUND_BITS * steps[index] for index, row in rows.items()}
        self._finite = all(row[0] <= 2.0 ** (SUM_BITS - BOUND_BITS) for row in rows.values())
        if self._finite:
            lost = math.fsum(row[1] * 2.0**ERROR_BITS * steps[index] for index, row in rows.items())
            added = math.fsum(row[2] * 2.0 ** self._magnitude_bits(index) * steps[index] for index, row in rows.items())
            self.relative_error = lost / added if added else 0.0
        self.exponents = {index: _next_exponent(self.exponents[index], row[0]) for index, row in rows.items()}
        return self._finite

    def to_gradients(self, index: int, window: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Convert the integers in `window` to floating-point numbers, first to fp64 and then to the dtype of `like`."""
        window = window.to(like.device)
        gradient, scale = torch.empty_like(window, dtype=like.dtype), 2.0 ** -self._received[index]
        for part, integers in zip(_parts(gradient), _parts(window), strict=True):
            part.copy_(integers.double().mul_(scale))
        return gradient

    @override
    def note_scaling(self, divisor: float) -> None:
        self._largest = {index: largest / abs(divisor) for index, largest in self._largest.items()}

    @override
    def sum_of_squares(self, gradients: Mapping[int, Sequence[torch.Tensor]]) -> np.ndarray:
        totals = np.zeros((len(self._numels), LIMBS))
        for row, index in zip(totals, self._numels, strict=True):
            for gradient in gradients.get(index, ()):
                for part in _parts(gradient):
                    row += self._squares(index, part)
        return totals.ravel()

    @override
    def norm(self, totals: np.ndarray) -> float:
        if not self._finite:
            return math.nan
        parts = [
            limb * 2.0 ** -(first + number * more)
            for row, index in zip(totals.reshape(-1, LIMBS).tolist(), self._numels, strict=True)
            for first, more in [self._limb_scales(index)]
            for number, limb in enumerate(row)
        ]
        return math.sqrt(max(0.0, math.fsum(parts)))

    def _squares(self, index: int, gradient: torch.Tensor) -> np.ndarray:
        first, more = self._limb_scales(index)
        remainder, limbs = gradient.double().square_().mul_(2.0**first), []
        for _ in range(LIMBS):
            rounded = remainder.round()
            limbs.append(rounded.sum())
            remainder = remainder.sub_(rounded).mul_(2.0**more)
        return torch.stack(limbs).cpu().numpy()

    def _round(
        self,
        index: int,
        segments: Sequence[Segment],
        flat: torch.Tensor,
        put: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> None:
        """Round gradients in parts. `put` receives the elements of `flat` for each part, and the integers as fp64."""
        scale = 2.0 ** self.exponents[index]
        largest, lost = torch.zeros(3, dtype=torch.float64, device=flat.device).split([1, 2])
        for start, gradient in segments:
            gradient = gradient if gradient.layout is torch.strided else gradient.to_dense()
            gradient = gradient.detach().reshape(-1)
            largest = torch.maximum(largest, largest_magnitude(gradient) * scale)
            lost_here, measured = torch.zeros_like(lost), 0
            targets = _parts(flat[start : start + gradient.numel()])
            for number, (part, target) in enumerate(zip(_parts(gradient), targets, strict=True)):
                exact = self._workspace(part).copy_(part).mul_(scale)
                if number % PARTS_PER_MEASUREMENT == 0:
                    lost_here += _lost(exact)
                    measured += exact.numel()
                put(target, exact.round_())
            lost = lost + lost_here * (gradient.numel() / max(1, measured))
        statistics = torch.cat(
            [
                # NaN and infinity become NaN.
                (largest * 2.0**-BOUND_BITS).ceil().clamp(max=MAX_BOUND) + (largest - largest),
                (lost[:1] * 2.0**-ERROR_BITS).ceil(),
                (lost[1:] * 2.0 ** -self._magnitude_bits(index)).round(),
            ]
        )
        self._statistics[index] = self._statistics[index] + statistics if index in self._statistics else statistics

    def _workspace(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return an fp64 buffer for a part of a gradient. It is reused, because new memory would cause page faults."""
        if self._work is None or self._work.device != gradient.device or self._work.numel() < gradient.numel():
            self._work = torch.empty(_max_part_numel(gradient), dtype=torch.float64, device=gradient.device)
        return self._work[: gradient.numel()]

    def _magnitude_bits(self, index: int) -> int:
        """Return n such that sums of magnitudes are exact if reported in units of 2**n integer steps."""
        return max(0, SUM_BITS + _bits(self._numels[index]) - EXACT_BITS)

    def _limb_scales(self, index: int) -> tuple[int, int]:
        """Return two scaling exponents: one for the squares of an array, and one for each remainder."""
        numel_bits = _bits(self._numels[index])
        largest = self._largest[index]
        square_bits = 2 * _bits(largest) if largest and math.isfinite(largest) else 0
        more = EXACT_BITS - numel_bits
        return max(EXPONENTS[0], min(EXPONENTS[1] - LIMBS * more, more - square_bits)), more


def _lost(exact: torch.Tensor) -> torch.Tensor:
    """Return the total magnitudes of the rounding errors and of the rounded numbers, fp64 `[2]`."""
    rounded = exact.round()
    magnitude = torch.linalg.vector_norm(rounded, 1)
    return torch.stack([torch.linalg.vector_norm(rounded.sub_(exact), 1), magnitude])


def _next_exponent(exponent: int, bound: float) -> int:
    """Return the exponent for the next minibatch. `bound`, from this one, is in multiples of 2**BOUND_BITS."""
    if not bound or not math.isfinite(bound):
        return exponent  # there are no gradients, or no exponent would help
    # The true value of a bound that was clamped to MAX_BOUND is unknown.
    bits = BOUND_BITS + (_bits(bound) if bound < MAX_BOUND else 2 * _bits(MAX_BOUND))
    wanted = exponent + SUM_BITS - HEADROOM_BITS - bits
    return max(EXPONENTS[0], min(EXPONENTS[1], exponent + MAX_RISE, wanted))


def _bits(number: float) -> int:
    """Return the smallest integer n with `2**n >= number`. `number` must be positive."""
    mantissa, exponent = math.frexp(number)
    return exponent - (mantissa == 0.5)


def _parts(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return flat.split(_max_part_numel(flat))


def _max_part_numel(flat: torch.Tensor) -> int:
    return _DEVICE_NUMEL if flat.is_cuda else _HOST_NUMEL

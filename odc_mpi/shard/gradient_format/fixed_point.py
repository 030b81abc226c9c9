"""Gradients as 64-bit fixed-point numbers: integers, whose sums do not depend on their order.

A gradient is multiplied by two to the power of its array's exponent, rounded to the nearest integer (ties to even), and
added up as an integer, at home, on the way and at its owner alike. The owner scales the sum back.

    lay_out, add   round once for each push: a call of a unit in a microbatch
    tell, hear     at A: bounds and errors, integers as well; the exponents of the next minibatch follow from their sums
    read           after A: the owner's integers as floating-point numbers
    squares, norm  at N: squares in integers, too

Everything that ranks tell each other here is a sum over pushes, or over elements, of integers that float64 holds
exactly. So it depends neither on which rank ran which microbatch nor on where shards are cut, and nor do the exponents.

Note: exponents
    Of each push all ranks come to know a bound of its largest element, and of each array the sum of these bounds, which
    no element of the sum, nor of a part of it, exceeds. Below 2**62 it is safe. Else the gradients count as not finite:
    the step is skipped and the exponent lowered, as the scale of a loss would be. The next exponent leaves 2**10 of
    headroom above the bound of this minibatch, so 52 bits are below it; it falls at once, and rises by 8 at most.

Note: the norm
    A square is cut into four integers, each of some 20 bits, the first of them scaled by the known bound of the array.
    The sum of the first over all elements of the array stays below 2**53, and so do those of the others.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from typing_extensions import override

from odc_mpi.comm.kernels.native import Segment, largest_magnitude
from odc_mpi.shard.gradient_format.base import GradientFormat

#: The magnitude that a sum must stay below, as a power of two.
SUM_BITS = 62
#: How much larger the gradients of the next minibatch may be, as a power of two.
HEADROOM_BITS = 10
#: Before anything is known: sums below 2**14, in steps of 2**-48.
FIRST_EXPONENT = 48
#: By how much an exponent rises at most from one minibatch to the next.
MAX_RISE = 8
#: Scales stay normal numbers of fp64.
EXPONENTS = (-900, 900)
#: Bounds are told in multiples of two to the power of this ...
BOUND_BITS = 30
#: ... and no larger than this many of them, so that 2**13 of the largest can be added up exactly.
MAX_BOUND = 2.0**40
#: Rounding errors are told in multiples of two to the power of this, of a step.
ERROR_BITS = -6
#: Of so many parts of a gradient that are worked on, one is measured.
MEASURED_BITS = 8
#: Integers that a square is cut into.
LIMBS = 4
#: float64 adds integers below two to the power of this exactly; one bit is left to what is rounded up.
EXACT_BITS = 52
#: Elements that are worked on at a time: on a host they stay in a core's cache.
_HOST_NUMEL, _DEVICE_NUMEL = 1 << 15, 1 << 22


class FixedPointGradients(GradientFormat):
    """Lays gradients out and adds them up as integers.

    Args:
        numels: Elements of each trained array, by index, in the same order on every rank.

    Attributes:
        exponents: Of each array, by index: its gradients are multiplied by two to the power of it.
        relative_error: Of the last minibatch: what rounding lost, to what was added up, both as sums of magnitudes over
            elements of all pushes, of large gradients over an eighth of them; the same on any number of ranks. 0 where
            nothing was pushed.
    """

    def __init__(self, numels: Mapping[int, int]) -> None:
        self._numels = dict(numels)
        self.exponents = dict.fromkeys(numels, FIRST_EXPONENT)
        self.relative_error = 0.0
        # Exponents of the sums that are complete, and bounds of their elements.
        self._received: dict[int, int] = {}
        self._finite = True
        self._largest: dict[int, float] = {}
        self._statistics: dict[int, torch.Tensor] = {}
        self._work: torch.Tensor | None = None

    @override
    def start(self) -> None:
        self._statistics = {}

    @override
    def write_flat(self, index: int, segments: Sequence[Segment], flat: torch.Tensor) -> None:
        filled = 0
        for start, piece in segments:
            flat[filled:start].zero_()
            filled = start + piece.numel()
        flat[filled:].zero_()
        self._round(index, segments, flat, torch.Tensor.copy_)

    @override
    def accumulate(self, index: int, segments: Sequence[Segment], flat: torch.Tensor) -> None:
        self._round(index, segments, flat, _add)

    def local_statistics(self) -> np.ndarray:
        """Return bounds, errors and magnitudes of what was pushed, `[3 * arrays]`. Local; waits for the device."""
        told = np.zeros((len(self._numels), 3))
        for row, index in zip(told, self._numels, strict=True):
            if index in self._statistics:
                row[:] = self._statistics[index].cpu().numpy()
        return told.ravel()

    def apply_global_statistics(self, totals: np.ndarray) -> bool:
        """Take the sums over all ranks; the exponents are those of the next minibatch from here on."""
        rows = dict(zip(self._numels, totals.reshape(-1, 3).tolist(), strict=True))
        self._received = dict(self.exponents)
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
        """Return the integers scaled back: rounded to the nearest number of fp64, then of the type of `like`."""
        window = window.to(like.device)
        gradient, scale = torch.empty_like(window, dtype=like.dtype), 2.0 ** -self._received[index]
        for part in _parts(window):
            gradient[part] = window[part].double().mul_(scale)
        return gradient

    @override
    def note_scaling(self, divisor: float) -> None:
        self._largest = {index: largest / abs(divisor) for index, largest in self._largest.items()}

    def sum_of_squares(self, gradients: Mapping[int, Sequence[torch.Tensor]]) -> np.ndarray:
        """Return the sums of squares in integers, `[arrays * LIMBS]`."""
        totals = np.zeros((len(self._numels), LIMBS))
        for row, index in zip(totals, self._numels, strict=True):
            for own in gradients.get(index, ()):
                for part in _parts(own):
                    row += self._squares(index, own[part])
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
        left, limbs = gradient.double().square_().mul_(2.0**first), []
        for _ in range(LIMBS):
            whole = left.round()
            limbs.append(whole.sum())
            left = left.sub_(whole).mul_(2.0**more)
        return torch.stack(limbs).cpu().numpy()

    def _round(
        self,
        index: int,
        segments: Sequence[Segment],
        flat: torch.Tensor,
        put: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> None:
        """Bring rounded gradients into `flat` by `put`, which takes a part of it and integers in fp64."""
        scale = 2.0 ** self.exponents[index]
        largest, lost = torch.zeros(3, dtype=torch.float64, device=flat.device).split([1, 2])
        for start, piece in segments:
            gradient = (piece.to_dense() if piece.layout is not torch.strided else piece).detach().reshape(-1)
            largest = torch.maximum(largest, largest_magnitude(gradient) * scale)
            lost_here, measured = torch.zeros_like(lost), 0
            for number, part in enumerate(_parts(gradient)):
                exact = self._workspace(gradient[part]).copy_(gradient[part]).mul_(scale)
                if number % MEASURED_BITS == 0:
                    lost_here += _lost(exact)
                    measured += exact.numel()
                put(flat[start + part.start : start + part.stop], exact.round_())
            lost = lost + lost_here * (gradient.numel() / max(1, measured))
        told = torch.cat(
            [
                # NaN and infinity become NaN.
                (largest * 2.0**-BOUND_BITS).ceil().clamp(max=MAX_BOUND) + (largest - largest),
                (lost[:1] * 2.0**-ERROR_BITS).ceil(),
                (lost[1:] * 2.0 ** -self._magnitude_bits(index)).round(),
            ]
        )
        self._statistics[index] = self._statistics[index] + told if index in self._statistics else told

    def _workspace(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return memory for a part of a gradient in fp64, the same each time: fresh memory costs page faults."""
        if self._work is None or self._work.device != gradient.device or self._work.numel() < gradient.numel():
            self._work = torch.empty(_max_magnitude(gradient), dtype=torch.float64, device=gradient.device)
        return self._work[: gradient.numel()]

    def _magnitude_bits(self, index: int) -> int:
        """Return the exponent of the multiples of a step in which magnitudes are told: their sums stay exact."""
        return max(0, SUM_BITS + _bits(self._numels[index]) - EXACT_BITS)

    def _limb_scales(self, index: int) -> tuple[int, int]:
        """Return the exponents by which squares of an array are scaled first, and by which what is left is."""
        numel_bits = _bits(self._numels[index])
        largest = self._largest[index]
        square_bits = 2 * _bits(largest) if largest and math.isfinite(largest) else 0
        more = EXACT_BITS - numel_bits
        return max(EXPONENTS[0], min(EXPONENTS[1] - LIMBS * more, more - square_bits)), more


def _add(flat: torch.Tensor, rounded: torch.Tensor) -> None:
    flat.add_(rounded.to(torch.int64))


def _lost(exact: torch.Tensor) -> torch.Tensor:
    """Return the sums of the magnitudes of rounding errors, and of what is rounded: fp64 `[2]`."""
    rounded = exact.round()
    magnitude = torch.linalg.vector_norm(rounded, 1)
    return torch.stack([torch.linalg.vector_norm(rounded.sub_(exact), 1), magnitude])


def _next_exponent(exponent: int, bound: float) -> int:
    """Return the exponent after a minibatch with a bound in multiples of 2**BOUND_BITS."""
    if not bound or not math.isfinite(bound):
        return exponent  # nothing is known, or no exponent would help
    # A bound that was cut off may have been anything.
    bits = BOUND_BITS + (_bits(bound) if bound < MAX_BOUND else 2 * _bits(MAX_BOUND))
    wanted = exponent + SUM_BITS - HEADROOM_BITS - bits
    return max(EXPONENTS[0], min(EXPONENTS[1], exponent + MAX_RISE, wanted))


def _bits(number: float) -> int:
    """Return the least integer such that two to the power of it is not below a positive number."""
    mantissa, exponent = math.frexp(number)
    return exponent - (mantissa == 0.5)


def _parts(flat: torch.Tensor) -> Iterator[slice]:
    most = _max_magnitude(flat)
    for start in range(0, flat.numel(), most):
        yield slice(start, min(start + most, flat.numel()))


def _max_magnitude(flat: torch.Tensor) -> int:
    return _DEVICE_NUMEL if flat.is_cuda else _HOST_NUMEL

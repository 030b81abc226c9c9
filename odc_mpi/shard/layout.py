"""Where every element of a parameter lives: order, padding, owners. Pure arithmetic, no memory, no communication.

A unit's parameters are laid end to end into one flat array, which is cut into as many equal shards as there are ranks:

    flat      [ q_proj.weight | pad | k_proj.weight | pad | norm.weight | ... ]
    shards    [      rank 0       |       rank 1       |       rank 2        | pad ]

A shard may begin in the middle of a parameter; a rank then owns a slice of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: Parameters and shards begin at multiples of this many elements: 128 bytes of fp32 and 64 of bf16, a cache line or
#: more, and what vectorised kernels ask for. The same for every dtype, so that parameters and gradients line up.
ALIGNMENT_NUMEL = 32


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as the module defines it.

    Attributes:
        name: Dotted name.
        shape: Shape of the whole parameter.
        requires_grad: Whether it is trained.
        dtype: Type in which it is hosted; None: the type of the parameter store.
    """

    name: str
    shape: tuple[int, ...]
    requires_grad: bool
    dtype: torch.dtype | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ParameterRange:
    """The place of a parameter in the flat array: elements `start` to `stop`."""

    spec: ParameterSpec
    start: int

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.spec.numel


@dataclass(frozen=True)
class Slice:
    """The part of a parameter that one rank owns, possibly empty.

    Attributes:
        spec: The parameter.
        start: First owned element of the flattened parameter.
        stop: One past the last.
        offset: Where `start` lies in the rank's shard.
    """

    spec: ParameterSpec
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of owned elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """The flat array of some parameters of a unit, and who owns which part of it.

    Attributes:
        name: For messages.
        ranges: Parameters in order.
        numel: Elements, padding between parameters included.
        num_owners: Ranks that share the array: rank r owns `[r * shard_numel, (r + 1) * shard_numel)`.
        shard_numel: Elements per rank, the same for all; the last shards may lie beyond `numel`, wholly or in part.
        trainable: Whether the parameters get gradients: all of them or none.
        dtype: Type of the parameters; None: the type of the parameter store.
    """

    name: str
    ranges: tuple[ParameterRange, ...]
    numel: int
    num_owners: int
    shard_numel: int
    trainable: bool
    dtype: torch.dtype | None = None

    @classmethod
    def build(cls, name: str, specs: Sequence[ParameterSpec], num_owners: int) -> "FlatLayout":
        """Lay parameters end to end and divide them evenly.

        Args:
            name: For messages.
            specs: Parameters in order; all trainable or all frozen, all of one type.
            num_owners: Ranks that share them.
        """
        assert specs and num_owners > 0
        assert len({(spec.requires_grad, spec.dtype) for spec in specs}) == 1, (
            "trainable and frozen parameters, and those of other types, need arrays of their own"
        )
        slots, start = [], 0
        for spec in specs:
            slots.append(ParameterRange(spec, start))
            start = _align(start + spec.numel)
        numel = slots[-1].stop
        shard_numel = _align(max(1, -(-numel // num_owners)))
        return cls(name, tuple(slots), numel, num_owners, shard_numel, specs[0].requires_grad, specs[0].dtype)

    def owned(self, rank: int) -> tuple[int, int]:
        """Return the first and one past the last element of the flat array of a rank; equal if it owns none."""
        start = min(rank * self.shard_numel, self.numel)
        return start, min(start + self.shard_numel, self.numel)

    def owners(self, start: int, stop: int) -> range:
        """Return the ranks that own some element of `[start, stop)`."""
        if start >= stop:
            return range(0)
        return range(start // self.shard_numel, (stop - 1) // self.shard_numel + 1)

    def slices(self, rank: int) -> tuple[Slice, ...]:
        """Return a rank's part of every parameter, in order; an empty slice where it owns nothing."""
        first, last = self.owned(rank)
        slices = []
        for slot in self.ranges:
            start = min(max(first, slot.start), slot.stop)
            stop = max(start, min(last, slot.stop))
            slices.append(Slice(slot.spec, start - slot.start, stop - slot.start, max(start - first, 0)))
        return tuple(slices)


def _align(numel: int) -> int:
    return -(-numel // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL

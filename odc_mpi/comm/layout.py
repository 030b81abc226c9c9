"""Layout of parameters in flat arrays: order, padding and owners. This module only computes; it does not use MPI.

The parameters of a unit (parameters that are fetched together) are concatenated into a flat array. The flat array is
split into shards of equal length, one per rank:

    flat      [ q_proj.weight | pad | k_proj.weight | pad | norm.weight | ... ]
    shards    [      rank 0       |       rank 1       |       rank 2        | pad ]

A rank is the owner of the elements in its shard. A shard may begin or end in the middle of a parameter, so a rank may
own only a slice of a parameter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: Parameters and shards begin at multiples of 32 elements: 128 bytes of fp32 and 64 bytes of bf16, which is at least a
#: cache line and the alignment of vectorized kernels. Parameters and gradients of different dtypes have equal layouts.
ALIGNMENT_NUMEL = 32


@dataclass(frozen=True)
class ParameterSpec:
    """Dotted name, full shape and dtype of a parameter."""

    name: str
    shape: tuple[int, ...]
    requires_grad: bool
    #: Dtype in the shards. None means the dtype of the parameter store.
    dtype: torch.dtype | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ParameterRange:
    """Position of a parameter in a flat array: elements `[start, stop)`."""

    spec: ParameterSpec
    start: int

    @property
    def stop(self) -> int:
        """Index after the last element."""
        return self.start + self.spec.numel


@dataclass(frozen=True)
class Slice:
    """Elements `[start, stop)` of a flattened parameter that one rank owns. A slice can be empty.

    The first element of the slice is at index `offset` of the rank's shard.
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
    """Layout of a flat array with parameters of a unit, and division of the array among the ranks.

    Attributes:
        numel: Number of elements, including the padding between parameters.
        num_owners: Number of ranks. Rank r owns `[r * shard_numel, (r + 1) * shard_numel)`.
        shard_numel: Elements per rank, equal on all ranks. The last shards may extend beyond `numel` or begin after it.
        dtype: Dtype in the shards. None means the dtype of the parameter store.
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
        """Create the layout of a flat array with the given parameters, divided among `num_owners` ranks.

        The parameters must have the same dtype and must be either all trainable or all frozen.
        """
        assert specs and num_owners > 0
        assert len({(spec.requires_grad, spec.dtype) for spec in specs}) == 1, (
            "trainable and frozen parameters, and those of different dtypes, need arrays of their own"
        )
        ranges, start = [], 0
        for spec in specs:
            ranges.append(ParameterRange(spec, start))
            start = _align(start + spec.numel)
        numel = ranges[-1].stop
        shard_numel = _align(max(1, -(-numel // num_owners)))
        return cls(name, tuple(ranges), numel, num_owners, shard_numel, specs[0].requires_grad, specs[0].dtype)

    def owned(self, rank: int) -> tuple[int, int]:
        """Return the range `(start, stop)` of the elements that a rank owns. The range can be empty."""
        start = min(rank * self.shard_numel, self.numel)
        return start, min(start + self.shard_numel, self.numel)

    def slices(self, rank: int) -> tuple[Slice, ...]:
        """Return the slices that a rank owns: one per parameter, in the order of parameters. Slices can be empty."""
        first, last = self.owned(rank)
        slices = []
        for whole in self.ranges:
            start = min(max(first, whole.start), whole.stop)
            stop = max(start, min(last, whole.stop))
            slices.append(Slice(whole.spec, start - whole.start, stop - whole.start, max(start - first, 0)))
        return tuple(slices)

    def owners(self, whole: ParameterRange) -> tuple[tuple[int, int, int], ...]:
        """Return `(rank, start, stop)` of each non-empty slice of a parameter, in the order of the elements."""
        ranks = range(whole.start // self.shard_numel, -(-whole.stop // self.shard_numel))
        bounds = [(rank, *self.owned(rank)) for rank in ranks] if whole.spec.numel else []
        return tuple(
            (rank, max(first, whole.start) - whole.start, min(last, whole.stop) - whole.start)
            for rank, first, last in bounds
        )


def _align(numel: int) -> int:
    return -(-numel // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL

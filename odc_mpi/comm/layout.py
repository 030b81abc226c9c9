"""Layout of parameters in flat arrays: order, padding and owners. This module does not use MPI.

The parameters of a unit are concatenated into a flat array, which is split into shards of equal length, one per rank:

    flat      [ q_proj.weight | pad | k_proj.weight | pad | norm.weight | ... ]
    shards    [      rank 0       |       rank 1       |       rank 2        | pad ]

Each rank owns the elements in its shard, which may begin or end in the middle of a parameter.

Frozen parameters of different dtypes share an array of bytes (`torch.uint8`). Positions in an array are in its own
elements, here bytes; only `start` and `stop` of a slice are in elements of the parameter.

With K islands (`comm.islands`), each island stores all shards. Rank r of an island stores shards `[r * K, (r + 1) * K)`
as one larger shard, but owns only one of them: in island k, shard `r * K + k`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

#: Parameters and shards begin at multiples of 32 elements: a cache line in bf16, half of one in arrays of bytes.
ALIGNMENT_NUMEL = 32


@dataclass(frozen=True)
class ParameterSpec:
    """Specification of a parameter: its dotted name, full shape and dtype, and whether it is trainable."""

    name: str
    shape: tuple[int, ...]
    requires_grad: bool
    #: Dtype in the shards. None means the parameter store's dtype.
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
    #: Number of array elements per element of the parameter: its size in bytes if the array is one of bytes, else 1.
    width: int = 1

    @property
    def stop(self) -> int:
        """Index after the last element."""
        return self.start + self.spec.numel * self.width


@dataclass(frozen=True)
class Slice:
    """Part of a parameter that one rank owns: elements `[start, stop)`, at index `offset` in the rank's shard."""

    spec: ParameterSpec
    start: int
    stop: int
    offset: int
    #: Number of array elements per element of the parameter, as in `ParameterRange`.
    width: int = 1

    @property
    def numel(self) -> int:
        """Number of owned elements."""
        return self.stop - self.start

    def view(self, shard: torch.Tensor) -> torch.Tensor:
        """Return a view of this slice in the rank's shard, `[numel]` of the parameter's dtype in the shards."""
        elements = shard[self.offset : self.offset + self.numel * self.width]
        return elements.view(self.spec.dtype) if self.width > 1 and self.spec.dtype else elements


@dataclass(frozen=True)
class FlatLayout:
    """Layout of a flat array of concatenated parameters, and its division into shards, one per rank.

    Attributes:
        numel: Number of elements, including the padding between parameters.
        num_owners: Number of ranks. Without islands, rank r owns elements `[r * shard_numel, (r + 1) * shard_numel)`.
        shard_numel: Number of elements per shard. The last shards may extend beyond `numel` or begin after it.
        num_islands: Number of islands, each with `num_owners / num_islands` consecutive ranks.
        node_ranks: The owners, if each node has the whole array, divided among its ranks: those of this node. Owners
            are then counted by their position here. None if the array is divided among all ranks.
    """

    name: str
    ranges: tuple[ParameterRange, ...]
    numel: int
    num_owners: int
    shard_numel: int
    trainable: bool
    dtype: torch.dtype | None = None
    num_islands: int = 1
    node_ranks: tuple[int, ...] | None = None

    @classmethod
    def build(
        cls,
        name: str,
        specs: Sequence[ParameterSpec],
        num_owners: int,
        num_islands: int = 1,
        node_ranks: tuple[int, ...] | None = None,
    ) -> "FlatLayout":
        """Create the layout of a flat array that holds the given parameters and is divided among `num_owners` ranks.

        Either all or none of them must be trainable. Frozen parameters of different dtypes, none of which is None, get
        an array of bytes.
        """
        assert specs and num_owners > 0
        dtypes, first = {spec.dtype for spec in specs}, specs[0]
        assert len({spec.requires_grad for spec in specs}) == 1, "trainable and frozen parameters need two arrays"
        dtype = first.dtype if len(dtypes) == 1 else torch.uint8
        assert len(dtypes) == 1 or not (first.requires_grad or None in dtypes), "an array of bytes of unknown dtypes"
        ranges, start = [], 0
        for spec in specs:
            width = spec.dtype.itemsize if dtype is torch.uint8 and spec.dtype else 1
            ranges.append(ParameterRange(spec, start, width))
            start = _align(ranges[-1].stop)
        numel = ranges[-1].stop
        num_owners = len(node_ranks) if node_ranks else num_owners
        shard_numel = _align(max(1, -(-numel // num_owners)))
        return cls(
            name, tuple(ranges), numel, num_owners, shard_numel, first.requires_grad, dtype, num_islands, node_ranks
        )

    @property
    def island_layout(self) -> "FlatLayout":
        """Layout of each island's copy of the array, which is divided among the ranks in the island."""
        return replace(
            self,
            num_owners=self.num_owners // self.num_islands,
            shard_numel=self.shard_numel * self.num_islands,
            num_islands=1,
        )

    def owned(self, rank: int) -> tuple[int, int]:
        """Return the range `(start, stop)` of elements that a rank owns, which may be empty."""
        if self.node_ranks:
            rank = self.node_ranks.index(rank)
        island, local_rank = divmod(rank, self.num_owners // self.num_islands)
        start = min((local_rank * self.num_islands + island) * self.shard_numel, self.numel)
        return start, min(start + self.shard_numel, self.numel)

    def slices(self, rank: int) -> tuple[Slice, ...]:
        """Return a rank's slice of each parameter, in the order of `ranges`. Slices may be empty."""
        first, last = self.owned(rank)
        slices = []
        for parameter in self.ranges:
            start = min(max(first, parameter.start), parameter.stop)
            stop = max(start, min(last, parameter.stop))
            begin, end = ((each - parameter.start) // parameter.width for each in (start, stop))
            slices.append(Slice(parameter.spec, begin, end, max(start - first, 0), parameter.width))
        return tuple(slices)

    def owners(self, parameter: ParameterRange) -> tuple[tuple[int, int, int], ...]:
        """Return `(rank, start, stop)` for each non-empty slice of a parameter, in element order."""
        numel = self.shard_numel
        shards = range(parameter.start // numel, -(-parameter.stop // numel)) if parameter.spec.numel else ()
        island_size = self.num_owners // self.num_islands
        ranks = (shard % self.num_islands * island_size + shard // self.num_islands for shard in shards)
        if self.node_ranks:
            ranks = (self.node_ranks[shard] for shard in shards)
        bounds = [(rank, *self.owned(rank)) for rank in ranks]
        return tuple(
            (
                rank,
                (max(first, parameter.start) - parameter.start) // parameter.width,
                (min(last, parameter.stop) - parameter.start) // parameter.width,
            )
            for rank, first, last in bounds
        )


def ranges_by_owner(shard_numel: int, rank: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Split the range `[start, stop)` of array elements by owner and yield `(owner, start, stop)` for each part.

    Owners come in cyclic order, beginning with the first one after `rank`, so that ranks do not all access rank 0
    first. Cache the result, because with a thousand owners, computing it takes longer than issuing the operations.
    """
    owners = range(start // shard_numel, -(-stop // shard_numel)) if start < stop else ()
    for owner in sorted(owners, key=lambda owner: (owner <= rank, owner)):
        yield owner, max(start, owner * shard_numel), min(stop, (owner + 1) * shard_numel)


def _align(numel: int) -> int:
    return -(-numel // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL

"""Tensors that are described by the places of their elements in stored tensors, and are read by ranges.

The conversions of transformers run on them unchanged: stacking, concatenation, splits and transposition rearrange the
description. An operation that computes values has no description, and raises `NotImplementedError`.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from typing_extensions import Self, override

from odc_mpi.checkpoint.index import Hyperslab, hyperslabs
from odc_mpi.shard.local_shards import WeightSource


class Region(NamedTuple):
    """Box of a tensor, whose elements are stored in another tensor.

    Attributes:
        source: Name of the stored tensor.
        offset: Index of the first element of the box in the flattened stored tensor.
        strides: Distance of neighbors in the flattened stored tensor, for each dimension of the box.
        position: First index of the box in each dimension.
        size: Extent of the box in each dimension.
    """

    source: str
    offset: int
    strides: tuple[int, ...]
    position: tuple[int, ...]
    size: tuple[int, ...]

    def clip(self, box: Hyperslab) -> "Region | None":
        """Return the part of this region in a box, with its position relative to the box, or None if it is empty."""
        bounds = [
            (max(low, start), min(high, start + extent))
            for (low, high), start, extent in zip(box, self.position, self.size, strict=True)
        ]
        if any(low >= high for low, high in bounds):
            return None
        skipped = [low - start for (low, _), start in zip(bounds, self.position, strict=True)]
        return self._replace(
            offset=self.offset + sum(stride * n for stride, n in zip(self.strides, skipped, strict=True)),
            position=tuple(low - first for (low, _), (first, _) in zip(bounds, box, strict=True)),
            size=tuple(high - low for low, high in bounds),
        )

    def move(self, dim: int, distance: int) -> "Region":
        """Return this region at another position in a dimension."""
        position = list(self.position)
        position[dim] += distance
        return self._replace(position=tuple(position))

    def insert(self, dim: int, index: int) -> "Region":
        """Return this region with a new dimension, in which it has one element, at `index`."""
        return self._rearrange(lambda values, new: [*values[:dim], new, *values[dim:]], (0, index, 1))

    def drop(self, dim: int) -> "Region":
        """Return this region without a dimension, in which it has one element."""
        return self._rearrange(lambda values, _: [*values[:dim], *values[dim + 1 :]])

    def swap(self, dim0: int, dim1: int) -> "Region":
        """Return this region with two dimensions exchanged."""

        def exchange(values: Sequence[int], _: int) -> list[int]:
            swapped = list(values)
            swapped[dim0], swapped[dim1] = swapped[dim1], swapped[dim0]
            return swapped

        return self._rearrange(exchange)

    def read(self, source: WeightSource) -> torch.Tensor:
        """Read the elements of this region, from the smallest range of the stored tensor that contains them."""
        last = self.offset + sum(s * (n - 1) for s, n in zip(self.strides, self.size, strict=True))
        stored = source.read(self.source, self.offset, last + 1)
        return stored.as_strided(self.size, self.strides)

    def _rearrange(
        self, change: Callable[[Sequence[int], int], list[int]], new: tuple[int, int, int] = (0, 0, 0)
    ) -> "Region":
        fields = zip((self.strides, self.position, self.size), new, strict=True)
        strides, position, size = (tuple(change(values, value)) for values, value in fields)
        return self._replace(strides=strides, position=position, size=size)


class PlacedTensor(torch.Tensor):
    """Tensor without memory, whose elements are in regions of stored tensors. Create it with `of`."""

    regions: list[Region]

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> Self:
        """Return a tensor of which all elements are stored in the tensor `name` of the same shape."""
        placed = torch.empty(tuple(shape), device="meta").as_subclass(cls)
        placed.regions = [Region(name, 0, placed.stride(), (0,) * len(shape), tuple(shape))]
        return placed

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        results = result if isinstance(result, list | tuple) else [result]
        if not any(isinstance(item, torch.Tensor) for item in results):
            return result  # a property, such as the shape
        rearrange = _REARRANGE.get(func.__name__)
        if rearrange is None:
            raise NotImplementedError(f"{func.__name__} computes new values")
        for item, regions in zip(results, rearrange(results, *args, **(kwargs or {})), strict=True):
            item.regions = regions
        return result

    def read_range(self, source: WeightSource, start: int, stop: int) -> torch.Tensor:
        """Read elements `[start, stop)` of this tensor, flattened, from the tensors that `source` reads."""
        if start >= stop:
            return torch.empty(0)
        region = self.regions[0]
        if region.size == self.shape and region.strides == self.stride():
            return source.read(region.source, region.offset + start, region.offset + stop)
        parts = [self._read_box(source, box).reshape(-1) for _, _, box in hyperslabs(self.shape, start, stop)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_box(self, source: WeightSource, box: Hyperslab) -> torch.Tensor:
        regions = [part for region in self.regions if (part := region.clip(box))]
        values = [region.read(source) for region in regions]
        if len(regions) == 1:
            return values[0]
        merged = torch.empty([high - low for low, high in box], dtype=values[0].dtype)
        for region, elements in zip(regions, values, strict=True):
            merged[tuple(slice(p, p + n) for p, n in zip(region.position, region.size, strict=True))] = elements
        return merged


def _stack(_: Any, tensors: Sequence[PlacedTensor], dim: int = 0) -> Iterator[list[Region]]:
    yield [region.insert(dim, index) for index, tensor in enumerate(tensors) for region in tensor.regions]


def _cat(_: Any, tensors: Sequence[PlacedTensor], dim: int = 0) -> Iterator[list[Region]]:
    starts = accumulate((tensor.shape[dim] for tensor in tensors), initial=0)
    yield [region.move(dim, start) for start, tensor in zip(starts, tensors, strict=False) for region in tensor.regions]


def _split(pieces: Sequence[PlacedTensor], tensor: PlacedTensor, _: Any, dim: int = 0) -> Iterator[list[Region]]:
    start = 0
    for piece in pieces:
        box = [(0, extent) for extent in tensor.shape]
        box[dim] = (start, start + piece.shape[dim])
        yield [part for region in tensor.regions if (part := region.clip(tuple(box)))]
        start += piece.shape[dim]


def _unbind(pieces: Sequence[PlacedTensor], tensor: PlacedTensor, dim: int = 0) -> Iterator[list[Region]]:
    for index in range(len(pieces)):
        box = [(0, extent) for extent in tensor.shape]
        box[dim] = (index, index + 1)
        yield [part.drop(dim) for region in tensor.regions if (part := region.clip(tuple(box)))]


def _squeeze(_: Any, tensor: PlacedTensor, dim: int | None = None) -> Iterator[list[Region]]:
    dims = range(tensor.ndim) if dim is None else [dim]  # None in transformers 5.13
    regions = tensor.regions
    for index in reversed([each for each in dims if tensor.shape[each] == 1]):
        regions = [region.drop(index) for region in regions]
    yield regions


def _transpose(_: Any, tensor: PlacedTensor, dim0: int, dim1: int) -> Iterator[list[Region]]:
    yield [region.swap(dim0, dim1) for region in tensor.regions]


def _same(_: Any, tensor: PlacedTensor) -> Iterator[list[Region]]:
    yield tensor.regions


#: Functions that return the regions of each result, by the name of the torch function.
_REARRANGE: dict[str, Callable[..., Iterator[list[Region]]]] = {
    "stack": _stack,
    "cat": _cat,
    "chunk": _split,
    "split": _split,
    "unbind": _unbind,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "contiguous": _same,
}

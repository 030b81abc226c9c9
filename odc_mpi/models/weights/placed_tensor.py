"""Tensors without memory that record where their elements are in stored tensors, so that ranges can be read.

The weight conversions of transformers run on these tensors unchanged: stacking, concatenating, splitting and
transposing rearrange the locations. An operation that computes new values raises `NotImplementedError`.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from typing_extensions import Self, override

from odc_mpi.checkpoint.index import Hyperslab, hyperslabs
from odc_mpi.shard.local_shards import WeightSource


class Dimension(NamedTuple):
    """Dimension of a box: its stride in the flattened stored tensor, first index in the placed tensor, and size."""

    stride: int
    position: int
    size: int


class Region(NamedTuple):
    """Box of elements in a placed tensor, and the location of these elements in a stored tensor.

    Attributes:
        source: Name of the stored tensor.
        offset: Index of the first element of the box in the flattened stored tensor.
        dims: Dimensions of the box.
    """

    source: str
    offset: int
    dims: tuple[Dimension, ...]

    def clip(self, box: Hyperslab) -> "Region | None":
        """Return the intersection of this region and `box`, positioned relative to `box`, or None if it is empty."""
        offset, dims = self.offset, []
        for (low, high), dim in zip(box, self.dims, strict=True):
            first, last = max(low, dim.position), min(high, dim.position + dim.size)
            if first >= last:
                return None
            offset += dim.stride * (first - dim.position)
            dims.append(Dimension(dim.stride, first - low, last - first))
        return Region(self.source, offset, tuple(dims))

    def move(self, dim: int, distance: int) -> "Region":
        """Return this region moved by `distance` along the dimension `dim`."""
        dims = list(self.dims)
        dims[dim] = dims[dim]._replace(position=dims[dim].position + distance)
        return self._replace(dims=tuple(dims))

    def insert(self, dim: int, index: int) -> "Region":
        """Return this region with a new dimension `dim` of size 1, at `index` in the placed tensor."""
        return self._replace(dims=(*self.dims[:dim], Dimension(0, index, 1), *self.dims[dim:]))

    def drop(self, dim: int) -> "Region":
        """Return this region without the dimension `dim`, whose size must be 1."""
        return self._replace(dims=(*self.dims[:dim], *self.dims[dim + 1 :]))

    def swap(self, dim0: int, dim1: int) -> "Region":
        """Return this region with the dimensions `dim0` and `dim1` exchanged."""
        dims = list(self.dims)
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
        return self._replace(dims=tuple(dims))

    def read(self, source: WeightSource) -> torch.Tensor:
        """Return the elements of this region, reading the smallest range of the stored tensor that contains them."""
        last = self.offset + sum(dim.stride * (dim.size - 1) for dim in self.dims)
        stored = source.read(self.source, self.offset, last + 1)
        return stored.as_strided([dim.size for dim in self.dims], [dim.stride for dim in self.dims])


class PlacedTensor(torch.Tensor):
    """Tensor without memory whose elements are in regions of stored tensors. Create it with `of`."""

    regions: list[Region]

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> Self:
        """Create a placed tensor with the elements of the stored tensor `name`, whose shape is `shape`."""
        placed = torch.empty(tuple(shape), device="meta").as_subclass(cls)
        dims = zip(placed.stride(), placed.shape, strict=True)
        placed.regions = [Region(name, 0, tuple(Dimension(stride, 0, size) for stride, size in dims))]
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
        """Read the elements `[start, stop)` of this flattened tensor from `source`, which reads the stored tensors."""
        if start >= stop:
            return torch.empty(0)
        region = self.regions[0]
        if [(dim.stride, dim.size) for dim in region.dims] == list(zip(self.stride(), self.shape, strict=True)):
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
            merged[tuple(slice(dim.position, dim.position + dim.size) for dim in region.dims)] = elements
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


#: Functions that return the regions of each result of a torch function, keyed by the name of the torch function.
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

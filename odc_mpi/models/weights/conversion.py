"""Names and layouts of published weights, from the conversion mapping with which transformers loads and saves models.

Published files may store the experts of a layer separately, use parameter names that differ from those in the module,
or omit the prefix of the base model. The conversions of transformers run unchanged on tensors without memory, which
record where their elements are in the stored tensors. Thus no weights are read, and any range of a converted tensor can
be read later.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from typing_extensions import Self, override

from odc_mpi.checkpoint.index import Hyperslab, hyperslabs
from odc_mpi.errors import UserError, one_line_message
from odc_mpi.shard.local_shards import WeightSource


class Region(NamedTuple):
    """Elements of a stored tensor that form a box in a placed tensor.

    Attributes:
        source: Name of the stored tensor.
        view: View of the stored tensor on the meta device. Its strides and storage offset locate the elements.
        start: Index of the first element of the box in the placed tensor.
    """

    source: str
    view: torch.Tensor
    start: tuple[int, ...]

    def clip(self, box: Hyperslab) -> "Region | None":
        """Return the intersection of this region and `box`, positioned relative to `box`, or None if it is empty."""
        slices, start = [], []
        for (low, high), first, size in zip(box, self.start, self.view.shape, strict=True):
            begin, end = max(low, first), min(high, first + size)
            if begin >= end:
                return None
            slices.append(slice(begin - first, end - first))
            start.append(begin - low)
        return Region(self.source, self.view[tuple(slices)], tuple(start))

    def move(self, dim: int, distance: int) -> "Region":
        """Return this region moved by `distance` along the dimension `dim`."""
        start = list(self.start)
        start[dim] += distance
        return self._replace(start=tuple(start))

    def drop(self, dim: int) -> "Region":
        """Return this region without the dimension `dim`, whose size must be 1."""
        return Region(self.source, self.view.squeeze(dim), (*self.start[:dim], *self.start[dim + 1 :]))

    def read(self, source: WeightSource) -> torch.Tensor:
        """Return the elements of this region, reading the smallest range of the stored tensor that contains them."""
        shape, strides, first = self.view.shape, self.view.stride(), int(self.view.storage_offset())
        last = first + sum(stride * (size - 1) for size, stride in zip(shape, strides, strict=True))
        return source.read(self.source, first, last + 1).as_strided(shape, strides)


class PlacedTensor(torch.Tensor):
    """Tensor without memory whose elements are in regions of stored tensors. Create it with `from_stored`.

    Operations that compute new values raise `NotImplementedError`.
    """

    regions: list[Region]

    @classmethod
    def from_stored(cls, name: str, shape: Sequence[int]) -> Self:
        """Create a placed tensor with the elements of the stored tensor `name`, whose shape is `shape`."""
        stored = torch.empty(tuple(shape), device="meta")
        placed = stored.as_subclass(cls)
        placed.regions = [Region(name, stored, (0,) * stored.ndim)]
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
        """Read elements `[start, stop)` of this flattened tensor from `source`, which reads the stored tensors."""
        if start >= stop:
            return torch.empty(0)
        region = self.regions[0]
        if region.view.shape == self.shape and region.view.is_contiguous():
            offset = int(region.view.storage_offset())
            return source.read(region.source, offset + start, offset + stop)
        parts = [self._read_box(source, box).reshape(-1) for _, _, box in hyperslabs(self.shape, start, stop)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_box(self, source: WeightSource, box: Hyperslab) -> torch.Tensor:
        regions = [part for region in self.regions if (part := region.clip(box))]
        values = [region.read(source) for region in regions]
        if len(regions) == 1:
            return values[0]
        merged = torch.empty([high - low for low, high in box], dtype=values[0].dtype)
        for region, elements in zip(regions, values, strict=True):
            sizes = zip(region.start, elements.shape, strict=True)
            merged[tuple(slice(first, first + size) for first, size in sizes)] = elements
        return merged


def _stack(_: Any, tensors: Sequence[PlacedTensor], dim: int = 0) -> Iterator[list[Region]]:
    yield [
        Region(region.source, region.view.unsqueeze(dim), (*region.start[:dim], index, *region.start[dim:]))
        for index, tensor in enumerate(tensors)
        for region in tensor.regions
    ]


def _cat(_: Any, tensors: Sequence[PlacedTensor], dim: int = 0) -> Iterator[list[Region]]:
    starts = accumulate((tensor.shape[dim] for tensor in tensors), initial=0)
    yield [region.move(dim, start) for start, tensor in zip(starts, tensors, strict=False) for region in tensor.regions]


def _narrow(tensor: PlacedTensor, dim: int, start: int, stop: int) -> list[Region]:
    box = [(0, size) for size in tensor.shape]
    box[dim] = (start, stop)
    return [part for region in tensor.regions if (part := region.clip(tuple(box)))]


def _split(results: Sequence[PlacedTensor], tensor: PlacedTensor, _: Any, dim: int = 0) -> Iterator[list[Region]]:
    stop = 0
    for result in results:
        start, stop = stop, stop + result.shape[dim]
        yield _narrow(tensor, dim, start, stop)


def _unbind(results: Sequence[PlacedTensor], tensor: PlacedTensor, dim: int = 0) -> Iterator[list[Region]]:
    for index in range(len(results)):
        yield [region.drop(dim) for region in _narrow(tensor, dim, index, index + 1)]


def _squeeze(_: Any, tensor: PlacedTensor, dim: int | None = None) -> Iterator[list[Region]]:
    dims = range(tensor.ndim) if dim is None else [dim]  # None in transformers 5.13
    regions = tensor.regions
    for index in reversed([each for each in dims if tensor.shape[each] == 1]):
        regions = [region.drop(index) for region in regions]
    yield regions


def _transpose(_: Any, tensor: PlacedTensor, dim0: int, dim1: int) -> Iterator[list[Region]]:
    dims = list(range(tensor.ndim))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    yield [Region(r.source, r.view.permute(dims), tuple(r.start[dim] for dim in dims)) for r in tensor.regions]


#: Functions that return the regions of each result of a torch function, keyed by the name of the torch function.
_REARRANGE: dict[str, Callable[..., Iterator[list[Region]]]] = {
    "stack": _stack,
    "cat": _cat,
    "chunk": _split,
    "split": _split,
    "unbind": _unbind,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "contiguous": lambda _, tensor: iter([tensor.regions]),
}


def loaded_tensors(
    module: transformers.PreTrainedModel, stored: Mapping[str, Callable[[], PlacedTensor]], wanted: Container[str]
) -> dict[str, PlacedTensor]:
    """Return, for each wanted tensor of a module, a `PlacedTensor` that locates its elements in the stored tensors.

    The result is keyed by the names in the module. Wanted tensors that are not in the model's files are omitted. Raises
    `UserError` if the shapes of stored tensors do not fit, or if a conversion computes new values.

    Args:
        stored: Functions, keyed by the names of the tensors in the files. Each returns a `PlacedTensor` for its stored
            tensor, and is called only if this tensor is used.
        wanted: Names of parameters and buffers in the module.
    """
    transforms = get_model_conversion_mapping(module)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, state = module.base_model_prefix, module.state_dict()
    conversions: dict[str, WeightRenaming | WeightConverter] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state or name not in wanted:
            continue
        conversion = deepcopy(by_pattern[pattern]) if pattern is not None else WeightRenaming(key, name)
        # The conversion calls a function when it needs the tensor; its annotation names only futures.
        conversions.setdefault(name, conversion).add_tensor(name, key, pattern or key, cast(Any, stored[key]))
    loaded: dict[str, PlacedTensor] = {}
    for name, conversion in conversions.items():
        try:
            converted = conversion.convert(name, model=module, config=module.config)
        except NotImplementedError as error:
            raise UserError(
                f"model.path: {name} cannot be read by slices ({error}): save the model with save_pretrained of "
                "transformers and save_original_format=False"
            ) from error
        except UserError:  # from reading a file
            raise
        except (ValueError, RuntimeError, AttributeError) as error:  # inconsistent shapes
            problem = one_line_message(error)
            raise UserError(f"model.path: the stored weights of {name} do not fit: {problem}") from error
        for target, tensor in converted.items():
            loaded[target] = tensor[0] if isinstance(tensor, list) else tensor
    return loaded


def published_tensors(
    module: transformers.PreTrainedModel, shapes: Mapping[str, Sequence[int]]
) -> dict[str, PlacedTensor]:
    """Return the tensors that `save_pretrained` writes, keyed by name, as `PlacedTensor` views of a module's tensors.

    `shapes` contains the shapes of the module's parameters and persistent buffers. Tied parameters occur only once.
    """
    ignored = set(module._keys_to_ignore_on_save or ())
    state: dict[str, Any] = {
        name: PlacedTensor.from_stored(name, shape) for name, shape in shapes.items() if name not in ignored
    }
    published = revert_weight_conversion(module, state)
    return {name: published[name] for name in sorted(published, key=dot_natural_key)}

"""Caches of keys and values in generation: families that cannot use one, or cannot share it between completions."""

import inspect
from typing import Any

import torch
import transformers

from odc_mpi.models.families import rope_types

#: Families for which transformers 5.24 fails with a cache (dory, xlstm), or computes other outputs than without one:
#: always (moshi, rwkv), for a prompt of one token after another prompt (recurrent_gemma), in padded batches (git).
WITHOUT_CACHE = {"dory", "git", "moshi", "recurrent_gemma", "rwkv", "xlstm"}
#: Layers of a transformers cache with keys and values only, which can be repeated, selected and padded on the left.
_KEY_VALUE_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer"}
#: Tensors of such a layer, whose first dimension is the rows, and their dimensions with a column per token.
_COLUMN_DIMS = {"keys": 2, "values": 2, "indexer_keys": 1}


def decodes_batches(module: Any) -> bool:
    """Return True if a model can decode padded prompts together, and reuse a prompt's cache for all its completions.

    It cannot without a cache, if its layers keep states, since these would include the padding, or if its attention
    chunks or rotary frequencies depend on the length of a row including its padding.
    """
    config = module.config.get_text_config(decoder=True)
    layers = {type(layer).__name__ for layer in transformers.DynamicCache(config=config).layers}
    by_length = "longrope" in rope_types(config.to_dict()) or "chunked_attention" in (
        getattr(config, "layer_types", None) or ()
    )
    takes_cache = cache_argument(module) in inspect.signature(module.forward).parameters
    has_cache = takes_cache and config.model_type not in WITHOUT_CACHE
    return has_cache and layers <= _KEY_VALUE_LAYERS and not by_length


def cache_argument(module: Any) -> str:
    """Return the name of the argument of `forward` for a cache, which is `cache` from transformers 5.24 on."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def append_rows(cache: transformers.Cache, num_rows: int, added: transformers.Cache, num_added: int) -> None:
    """Append the `num_added` rows of the cache `added` to the `num_rows` rows of `cache`, in place.

    A row is a sequence, and a column a token position. All rows end in the same column: those with fewer columns are
    padded on the left with zeros, which the attention mask must exclude. This is local, without communication.
    """
    layers: list[tuple[Any, Any]] = list(zip(cache.layers, added.layers, strict=True))
    for layer, other in layers:
        if other.keys is not None and (layer.keys is None or not layer.is_initialized):
            layer.lazy_initialization(other.keys, other.values)
        for name, dim in _COLUMN_DIMS.items():
            parts: list[Any] = [getattr(each, name, None) for each in (layer, other)]
            filled = [part is not None and part.numel() > 0 for part in parts]
            if any(filled):
                example: torch.Tensor = parts[filled.index(True)]
                shape = [num_rows + num_added, *example.shape[1:]]
                shape[dim] = max(part.shape[dim] for part, has in zip(parts, filled, strict=True) if has)
                joined = example.new_zeros(shape)
                for part, has, rows in zip(parts, filled, joined.split((num_rows, num_added)), strict=True):
                    if has:
                        rows.narrow(dim, shape[dim] - part.shape[dim], part.shape[dim]).copy_(part)
                setattr(layer, name, joined)
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = max(layer.cumulative_length, other.cumulative_length)


def drop_columns(cache: transformers.Cache, count: int) -> None:
    """Remove the first `count` columns, which must be padding in all rows, in place and without communication."""
    layers: list[Any] = cache.layers
    for layer in layers:
        length = getattr(layer, "cumulative_length", None)
        for name, dim in _COLUMN_DIMS.items():
            values = getattr(layer, name, None)
            if values is not None and values.numel():
                # A layer with a sliding window has the last columns only.
                kept = min(values.shape[dim], length - count) if length is not None else values.shape[dim] - count
                setattr(layer, name, values.narrow(dim, values.shape[dim] - kept, kept).clone())
        if length is not None:
            layer.cumulative_length = length - count

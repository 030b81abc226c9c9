"""Caches of keys and values in generation: families that cannot use one, or cannot share it between completions."""

import inspect
from typing import Any

import transformers

from odc_mpi.models.families import rope_types

#: Families for which transformers 5.24 fails with a cache (dory, xlstm), or computes other outputs than without one:
#: always (moshi, rwkv), for a prompt of one token after another prompt (recurrent_gemma), in padded batches (git).
WITHOUT_CACHE = {"dory", "git", "moshi", "recurrent_gemma", "rwkv", "xlstm"}
#: Layers of a transformers cache with keys and values only, which can be repeated, selected and padded on the left.
_KEY_VALUE_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer"}


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

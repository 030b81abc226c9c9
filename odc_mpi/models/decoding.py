"""Generation with a model that may be in training. The training state of the model is restored afterward."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import transformers

from odc_mpi.models.attention import IMPLEMENTATIONS
from odc_mpi.models.families import rope_types
from odc_mpi.shard.model import ShardedModel

#: Function that calls the model's `generate` and returns the tokens of prompts and completions. Its arguments are the
#: prompts' tokens and attention mask, both int64 `[rows, tokens]`; a dict of `GenerationConfig` settings; a `Cache` or
#: None; and any other keyword arguments for `generate`.
DecodeFn = Callable[..., torch.Tensor]

#: Families for which transformers 5.24 fails with a cache (dory, xlstm), or computes other outputs than without one:
#: always (moshi, rwkv), for a prompt of one token after another prompt (recurrent_gemma), in padded batches (git).
_WITHOUT_CACHE = {"dory", "git", "moshi", "recurrent_gemma", "rwkv", "xlstm"}
#: Layers of a transformers cache with keys and values only, which can be repeated, selected and padded on the left.
_KEY_VALUE_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer"}


class Prompt(NamedTuple):
    """Tokenized prompt.

    Attributes:
        number: Index of the prompt. The sampling seed for its completions is derived from this index.
        tokens: Tokens of the prompt, at least one.
        stop: Stop tokens. A completion ends with the first stop token that is generated.
    """

    number: int
    tokens: Sequence[int]
    stop: Sequence[int]


@contextmanager
def generation_mode(module: Any) -> Iterator[DecodeFn]:
    """Context manager that puts a model into evaluation mode, with a cache except in families of `_WITHOUT_CACHE`.

    `module` is a transformers causal language model, or the `module` of a sharded one. In the `with` block, the model
    uses transformers' attention. On exit, its modes and settings and PyTorch's random number generators are restored.
    Yields a function that calls the model's `generate` (see `DecodeFn`). Calls are one-sided if the model is sharded.
    """
    cache_name, has_cache = _cache_name(module), module.config.model_type not in _WITHOUT_CACHE

    def decode(
        tokens: torch.Tensor,
        mask: torch.Tensor,
        settings: dict[str, Any],
        cache: transformers.Cache | None = None,
        **arguments: Any,
    ) -> torch.Tensor:
        if cache is not None:
            arguments[cache_name] = cache
        decoded: torch.Tensor = module.generate(
            tokens.to(module.device),
            attention_mask=mask.to(module.device),
            generation_config=transformers.GenerationConfig(use_cache=has_cache, **settings),
            **arguments,
        )
        return decoded

    training = [submodule for submodule in module.modules() if submodule.training]
    configs: list[Any] = list({id(m.config): m.config for m in module.modules() if hasattr(m, "config")}.values())
    before = [(config, config._attn_implementation, getattr(config, "use_cache", None)) for config in configs]
    default = module.generation_config
    devices = [module.device] if module.device.type == "cuda" else []
    try:
        module.eval()
        eager = module.config._attn_implementation in ("eager", IMPLEMENTATIONS["eager"]) or not module._supports_sdpa
        module.set_attn_implementation("eager" if eager else "sdpa")
        # Ignore defaults from the model's generation_config.json: `SamplingParams` has all settings.
        module.generation_config = transformers.GenerationConfig()
        for config in configs:
            config.use_cache = has_cache
        with torch.random.fork_rng(devices=devices):
            yield decode
    finally:
        module.generation_config = default
        for config, attention, use_cache in before:
            config._attn_implementation = attention
            config.use_cache = use_cache
        for submodule in training:
            submodule.training = True


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
    takes_cache = _cache_name(module) in inspect.signature(module.forward).parameters
    has_cache = takes_cache and config.model_type not in _WITHOUT_CACHE
    return has_cache and layers <= _KEY_VALUE_LAYERS and not by_length


def _cache_name(module: Any) -> str:
    # From transformers 5.24 on, the argument of the forward is `cache`.
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def unsharded_if_fits(model: ShardedModel) -> AbstractContextManager[None]:
    """Return a context manager that unshards a model if its parameter cache is large enough. One-sided on entry."""
    fits = model.cache_needs.maximum.parameters <= model.cache_bytes.parameters
    return model.unsharded(gradients=False) if fits else nullcontext()

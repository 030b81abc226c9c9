"""Generation with a model that may be in training. The training state of the model is restored afterward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import transformers

from odc_mpi.models.attention import IMPLEMENTATIONS
from odc_mpi.models.quirks.caches import WITHOUT_CACHE, cache_argument
from odc_mpi.shard.model import ShardedModel

#: Function that calls the model's `generate` and returns the tokens of prompts and completions. Its arguments are the
#: prompts' tokens and attention mask, both int64 `[rows, tokens]`; a dict of `GenerationConfig` settings; a `Cache` or
#: None; and any other keyword arguments for `generate`.
DecodeFn = Callable[..., torch.Tensor]


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
    """Context manager that puts a model into evaluation mode, with a cache except in families of `WITHOUT_CACHE`.

    `module` is a transformers causal language model, or the `module` of a sharded one. In the `with` block, the model
    uses transformers' attention. On exit, its modes and settings and PyTorch's random number generators are restored.
    Yields a function that calls the model's `generate` (see `DecodeFn`). Calls are one-sided if the model is sharded.
    """
    argument, has_cache = cache_argument(module), module.config.model_type not in WITHOUT_CACHE

    def decode(
        tokens: torch.Tensor,
        mask: torch.Tensor,
        settings: dict[str, Any],
        cache: transformers.Cache | None = None,
        **arguments: Any,
    ) -> torch.Tensor:
        if cache is not None:
            arguments[argument] = cache
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


def unsharded_if_fits(model: ShardedModel) -> AbstractContextManager[None]:
    """Return a context manager that unshards a model if its parameter cache is large enough. One-sided on entry."""
    fits = model.cache_needs.maximum.parameters <= model.cache_bytes.parameters
    return model.unsharded(gradients=False) if fits else nullcontext()

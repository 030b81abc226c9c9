"""What `generate` and `sample` have in common: a model that may be in training decodes, and is afterwards as it was."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
import transformers

from odc_mpi.models.attention import IMPLEMENTATIONS
from odc_mpi.shard.model import ShardedModel

#: A call of the model's `generate`. Arguments: tokens and their attention mask, int64 [rows, tokens], a dict of
#: `GenerationConfig` settings, a `Cache` or None, and further arguments of `generate`. Returns the tokens followed by
#: the new ones.
DecodeFn = Callable[..., torch.Tensor]


class Prompt(NamedTuple):
    """What a completion continues.

    Attributes:
        number: Of the prompt, which seeds its sampling.
        tokens: Not empty.
        stop: Tokens that end a completion.
    """

    number: int
    tokens: Sequence[int]
    stop: Sequence[int]


@contextmanager
def generation_mode(module: transformers.PreTrainedModel, seed: int | None = None) -> Iterator[DecodeFn]:
    """Make a model ready to decode, with a cache of keys and values, and undo that at the end.

    The attention over packed sequences, which knows no cache, gives way to transformers' own. Modes and settings of the
    module and torch's random state are afterwards what they were before.

    Args:
        module: A causal language model of transformers; of a sharded model its `module`.
        seed: Of torch's random numbers in the enclosed code; None: they go on.

    Yields:
        What decodes; one-sided if the module is that of a sharded model.
    """
    cache_name = _cache_name(module)

    def decode(
        tokens: torch.Tensor,
        mask: torch.Tensor,
        settings: dict[str, Any],
        cache: transformers.Cache | None = None,
        **arguments: Any,
    ) -> torch.Tensor:
        if cache is not None:
            arguments[cache_name] = cache
        found: torch.Tensor = cast(Any, module).generate(
            tokens.to(module.device),
            attention_mask=mask.to(module.device),
            generation_config=transformers.GenerationConfig(use_cache=True, **settings),
            **arguments,
        )
        return found

    devices = [module.device] if module.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), _with_cache(module):
        if seed is not None:
            torch.manual_seed(seed)
        yield decode


def _cache_name(module: transformers.PreTrainedModel) -> str:
    """Return the name under which the model takes its key/value cache: `cache` from transformers 5.24 on."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


@contextmanager
def _with_cache(module: transformers.PreTrainedModel) -> Iterator[None]:
    training = [submodule for submodule in module.modules() if submodule.training]
    configs: list[Any] = list({id(m.config): m.config for m in module.modules() if hasattr(m, "config")}.values())
    before = [(config, config._attn_implementation, getattr(config, "use_cache", None)) for config in configs]
    default = module.generation_config
    try:
        module.eval()
        eager = module.config._attn_implementation in ("eager", IMPLEMENTATIONS["eager"]) or not module._supports_sdpa
        module.set_attn_implementation("eager" if eager else "sdpa")
        # Whatever a model's own file proposes: `SamplingParams` says it all.
        module.generation_config = transformers.GenerationConfig()
        for config in configs:
            config.use_cache = True
        yield
    finally:
        module.generation_config = default
        for config, attention, use_cache in before:
            config._attn_implementation = attention
            config.use_cache = use_cache
        for submodule in training:
            submodule.training = True


def unsharded_if_fits(model: ShardedModel) -> AbstractContextManager[None]:
    """Have the whole model on this rank while it decodes, if its budget holds it. One-sided."""
    fits = model.cache_needs.maximum.parameters <= model.cache_bytes.parameters
    return model.unsharded(gradients=False) if fits else nullcontext()

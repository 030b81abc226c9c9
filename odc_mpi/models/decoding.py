"""Generation with a model that may be in training. The training state of the model is restored afterward."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import transformers

from odc_mpi.errors import UserError
from odc_mpi.models.attention import IMPLEMENTATIONS
from odc_mpi.models.quirks.caches import WITHOUT_CACHE, cache_argument
from odc_mpi.shard.model import ShardedModel


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
def generation_mode(module: Any) -> Iterator[None]:
    """Context manager that puts a model into evaluation mode, with a cache except in families of `WITHOUT_CACHE`.

    `module` is a transformers causal language model, or the `module` of a sharded one. In the `with` block, the model
    uses transformers' attention. On exit, its modes and settings and PyTorch's random number generators are restored.
    """
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
            config.use_cache = _has_cache(module)
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        module.generation_config = default
        for config, attention, use_cache in before:
            config._attn_implementation = attention
            config.use_cache = use_cache
        for submodule in training:
            submodule.training = True


def run_generate(
    module: Any, tokens: torch.Tensor, mask: torch.Tensor, settings: dict[str, Any], **arguments: Any
) -> torch.Tensor:
    """Call the model's `generate`, and return the tokens of prompts and completions. One-sided if it is sharded.

    For use in `generation_mode`. `tokens` and `mask` are those of the prompts, int64 `[rows, tokens]`. `settings` are
    those of a `GenerationConfig`, and `arguments` any others of `generate`.
    """
    decoded: torch.Tensor = module.generate(
        tokens.to(module.device),
        attention_mask=mask.to(module.device),
        generation_config=transformers.GenerationConfig(use_cache=_has_cache(module), **settings),
        **arguments,
    )
    return decoded


def _has_cache(module: Any) -> bool:
    return module.config.model_type not in WITHOUT_CACHE


def unsharded_if_fits(model: ShardedModel) -> AbstractContextManager[None]:
    """Return a context manager that unshards a model if its parameter cache is large enough. One-sided on entry."""
    fits = model.cache_needs.maximum.parameters <= model.cache_bytes.parameters
    return model.unsharded(gradients=False) if fits else nullcontext()


class CachedForward:
    """Forward pass of a model that decodes batches (see `decodes_batches`), for use in `generation_mode`."""

    def __init__(self, module: Any) -> None:
        self._module, self.device = module, module.device
        self._cache_argument = cache_argument(module)
        self._accepted = inspect.signature(module.forward).parameters.keys()

    def next_logits(self, tokens: torch.Tensor, mask: torch.Tensor, cache: transformers.Cache) -> torch.Tensor:
        """Return the logits after the last of `tokens`, float32 `[rows, vocabulary]`. One-sided if it is sharded.

        `tokens`, int64 `[rows, new]`, follow those in `cache`, to which their keys and values are added. `mask`, int64
        `[rows, cached + new]`, is 0 for padding.
        """
        mask = mask.to(self.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        optional = {"position_ids": positions, "logits_to_keep": 1}
        inputs = self._module.prepare_inputs_for_generation(
            tokens.to(self.device),
            attention_mask=mask,
            use_cache=True,
            **{self._cache_argument: cache},
            **{name: value for name, value in optional.items() if name in self._accepted},
        )
        with torch.no_grad():
            logits: torch.Tensor = self._module(**inputs, return_dict=True).logits
        return logits[:, -1].float()

    def cache_bytes(self, length: int) -> int:
        """Return the bytes of the keys and values of a row of `length` tokens. One-sided if the model is sharded."""
        cache: Any = transformers.DynamicCache(config=self._module.config.get_text_config(decoder=True))
        with generation_mode(self._module):
            self.next_logits(torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64), cache)
        layers = [layer for layer in cache.layers if layer.keys is not None]
        return sum(
            (layer.keys.nbytes + layer.values.nbytes) // 2 * min(length, getattr(layer, "sliding_window", length))
            for layer in layers
        )


def max_new_tokens_for(module: Any, prompt: Prompt) -> int:
    """Return the maximum number of tokens that a model can generate after a prompt, or 2**30 if there is no limit.

    Raises `UserError` if the prompt is empty or too long, or if it contains a token outside the model's vocabulary.
    """
    config = module.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if not prompt.tokens:
        raise UserError(f"prompt {prompt.number}: expected at least one token, got none")
    if max(prompt.tokens) >= config.vocab_size:
        raise UserError(
            f"prompt {prompt.number}: expected tokens below the model's vocab_size, {config.vocab_size}, got "
            f"{max(prompt.tokens)}: use the tokenizer of the model, or save the model after "
            f"resize_token_embeddings({max(prompt.tokens) + 1}) of transformers"
        )
    if positions is not None and len(prompt.tokens) >= positions:
        raise UserError(
            f"prompt {prompt.number}: expected fewer tokens than the model's max_position_embeddings, {positions}, got "
            f"{len(prompt.tokens)}: shorten it"
        )
    return 1 << 30 if positions is None else positions - len(prompt.tokens)

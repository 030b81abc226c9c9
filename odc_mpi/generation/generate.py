"""Generation of one completion for a single prompt with transformers.

Each prompt is decoded separately, with a sampling seed that depends only on `SamplingParams.seed` and the number of the
prompt. A completion therefore does not depend on the rank or on other prompts.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from odc_mpi.errors import UserError
from odc_mpi.models.decoding import Prompt, generation_mode


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings. The constructor raises `UserError` if a value is out of range.

    Completions are limited to fewer than `max_new_tokens` tokens if the model has too few positions. A temperature of 0
    selects the most likely token. `top_p`, in (0, 1], is the threshold for nucleus sampling; 1 disables it.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens: expected 1 or more, got {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature: expected a finite number, 0 or more, got {self.temperature:g}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: expected above 0 and at most 1, got {self.top_p:g}")
        if self.seed < 0:
            raise UserError(f"seed: expected 0 or more, got {self.seed}")


class CompletionOutput(NamedTuple):
    """Completion of the prompt with index `number`. `tokens` includes the stop token at the end, if any.

    `finish_reason` is "stop" if the completion ended with a stop token, and "length" if it reached the maximum length.
    """

    number: int
    tokens: list[int]
    finish_reason: str


def generate(module: Any, prompt: Prompt, sampling: SamplingParams, streamer: Any = None) -> CompletionOutput:
    """Generate a completion of a prompt. One-sided if the model is sharded.

    `module` is a transformers causal language model, or the `module` of a sharded one. `streamer` is a transformers
    streamer that receives each token as soon as it is generated. Raises the same errors as `max_new_tokens_for`.
    """
    max_new_tokens = max_new_tokens_for(module, prompt)
    tokens = torch.tensor([list(prompt.tokens)])
    settings = {
        "max_new_tokens": min(sampling.max_new_tokens, max_new_tokens),
        "do_sample": sampling.temperature > 0,
        "temperature": sampling.temperature or None,
        "top_p": sampling.top_p if sampling.temperature else None,
        "top_k": 0 if sampling.temperature else None,
        "eos_token_id": list(prompt.stop) or None,
        "pad_token_id": next(iter(prompt.stop), 0),
    }
    with generation_mode(module) as decode:
        torch.manual_seed(prompt_seed(sampling.seed, prompt.number))
        decoded = decode(tokens, torch.ones_like(tokens), settings, streamer=streamer)
    new: list[int] = decoded[0, len(prompt.tokens) :].tolist()
    return CompletionOutput(prompt.number, new, "stop" if new[-1] in prompt.stop else "length")


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


def prompt_seed(seed: int, number: int) -> int:
    """Compute the sampling seed of a prompt from `SamplingParams.seed` and `Prompt.number`."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0] >> 1)

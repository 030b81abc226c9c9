"""One prompt in, one completion out: `generate`, by transformers. Local, or one-sided on a sharded model.

The function is all that others know of generation (`GenerateFn`), so that an inference engine can take its place. A
prompt has the same completion on any rank, whatever else the rank generates: sampling is seeded by the seed and the
prompt's number, and each prompt is decoded by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from odc_mpi.errors import UserError
from odc_mpi.models.decoding import Prompt, generation_mode


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: The most tokens of a completion; fewer where the model has no more positions.
        temperature: Of the softmax; 0 takes the most likely token.
        top_p: Of the most likely tokens those that together have this probability are drawn from.
        seed: Of what is drawn.

    Raises:
        UserError: A value is out of its range.
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
    """What a model made of a prompt.

    Attributes:
        number: That of the prompt.
        tokens: Without those of the prompt; the last may be a stop token.
        finish_reason: stop, or length.
    """

    number: int
    tokens: list[int]
    finish_reason: str


#: What generates: `generate`, or an inference engine; takes the arguments of `generate`.
GenerateFn = Callable[[Any, Prompt, SamplingParams, Any], CompletionOutput]


def generate(
    module: transformers.PreTrainedModel, prompt: Prompt, sampling: SamplingParams, streamer: Any = None
) -> CompletionOutput:
    """Continue a prompt. Local; one-sided if the module is that of a sharded model.

    Args:
        module: A causal language model of transformers; of a sharded model its `module`.
        prompt: To continue.
        sampling: How.
        streamer: A streamer of transformers, which gets the tokens as they come.

    Raises:
        UserError: The prompt is empty, longer than the model's positions, or has tokens that the model does not know.
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
    with generation_mode(module, prompt_seed(sampling.seed, prompt.number)) as decode:
        found = decode(tokens, torch.ones_like(tokens), settings, streamer=streamer)
    new: list[int] = found[0, len(prompt.tokens) :].tolist()
    return CompletionOutput(prompt.number, new, "stop" if new[-1] in prompt.stop else "length")


def max_new_tokens_for(module: transformers.PreTrainedModel, prompt: Prompt) -> int:
    """Return how many tokens the model can add to a prompt.

    Raises:
        UserError: None, or the prompt is no sequence of the model's tokens.
    """
    config = module.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if not prompt.tokens:
        raise UserError(f"prompt {prompt.number}: expected at least one token, got none")
    if max(prompt.tokens) >= config.vocab_size:
        raise UserError(
            f"prompt {prompt.number}: the token {max(prompt.tokens)} is beyond the model's {config.vocab_size}: the "
            "tokenizer is not the model's"
        )
    if positions is not None and len(prompt.tokens) >= positions:
        raise UserError(
            f"prompt {prompt.number}: expected fewer tokens than the model's max_position_embeddings, {positions}, got "
            f"{len(prompt.tokens)}: shorten it"
        )
    return 1 << 30 if positions is None else positions - len(prompt.tokens)


def prompt_seed(seed: int, number: int) -> int:
    """Return the seed of what is drawn for a prompt."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0] >> 1)

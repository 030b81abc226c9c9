"""Settings and results of generation, and generation of one completion for a single prompt."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from odc_mpi.errors import UserError
from odc_mpi.models.decoding import Prompt, generation_mode
from odc_mpi.rollout.decode import prompt_batch
from odc_mpi.rollout.sampling import PromptCompletions, RolloutSamplingParams


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

    @property
    def rollout(self) -> RolloutSamplingParams:
        """The same settings, for one completion per prompt."""
        return RolloutSamplingParams(1, self.max_new_tokens, self.temperature, self.top_p, seed=self.seed)


class CompletionOutput(NamedTuple):
    """Completion of the prompt with index `number`. `tokens` includes the stop token at the end, if any.

    `finish_reason` is "stop" if the completion ended with a stop token, and "length" if it reached the maximum length.
    """

    number: int
    tokens: list[int]
    finish_reason: str


def completion_output(number: int, completions: PromptCompletions) -> CompletionOutput:
    """Return the only completion of the prompt `number`."""
    return CompletionOutput(number, completions.tokens[0], "stop" if completions.stopped[0] else "length")


def generate(module: Any, prompt: Prompt, sampling: SamplingParams, streamer: Any = None) -> CompletionOutput:
    """Generate a completion of a prompt. One-sided if the model is sharded.

    `module` is a transformers causal language model, or the `module` of a sharded one. `streamer` is a transformers
    streamer that receives the prompt, and then each token as soon as it is generated. Raises the same errors as
    `max_new_tokens_for`.
    """
    outputs: list[CompletionOutput] = []
    batch = prompt_batch(
        module, sampling.rollout, 1, lambda number, found: outputs.append(completion_output(number, found))
    )
    with generation_mode(module):
        batch.add({prompt.number: prompt}, step=0)
        tokens = batch.prompts[prompt.number].completions[0].tokens
        num_sent = 0
        if streamer:
            streamer.put(torch.tensor([list(prompt.tokens)]))  # as `generate` of transformers does

        def send(_: int = 0) -> None:
            nonlocal num_sent
            for token in tokens[num_sent:] if streamer else ():
                streamer.put(torch.tensor([token]))
            num_sent = len(tokens)

        while batch.prompts:
            batch.step(0, send)
        send()
    if streamer:
        streamer.end()
    return outputs[0]

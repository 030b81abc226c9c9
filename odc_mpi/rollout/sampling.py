"""Sampling of tokens: settings, random numbers, and completions in progress.

The random numbers for a completion depend on the seed, the step, the prompt and the index of the completion, but not on
the rank or on other completions that are decoded at the same time.

Each token is sampled with one uniform random number. Its log-probability under the policy at the sampling temperature
is stored, but the logits are not, so memory does not grow with vocabulary size times length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessorList

from odc_mpi.models.decoding import Prompt

#: Maximum number of elements in the float64 distributions that are in memory during sampling.
_MAX_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class RolloutSamplingParams:
    """Sampling settings for rollouts. All except `seed` have the same names as settings in the section `rl`.

    A temperature of 0 selects the most likely token. `top_p` 1, `top_k` 0, `min_p` 0 and `repetition_penalty` 1 disable
    these limits. The random numbers depend on `seed`, the seed of the run, and on the step of a prompt.
    """

    num_generations: int
    max_completion_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0


class PromptCompletions(NamedTuple):
    """Completions of a prompt.

    Attributes:
        tokens: Tokens of each completion, including the stop token at the end, if any.
        logps: For each completion, the log-probabilities of its tokens, float32 `[tokens]`, at the sampling
            temperature, before `top_k`, `top_p`, `min_p` and `repetition_penalty`.
        stopped: For each completion, True if it ended with a stop token, and False if it was truncated.
        entropy: Entropy of the same token distributions, in nats, summed over all tokens.
        steps: For each completion, the training step in which each token was sampled, int64 `[tokens]`.
    """

    tokens: list[list[int]]
    logps: list[npt.NDArray[np.float32]]
    stopped: list[bool]
    entropy: float
    steps: list[npt.NDArray[np.int64]]


class Completion:
    """Completion in progress of a prompt, of at most `max_length` tokens. `uniforms` are float64 `[max_length]`."""

    def __init__(self, prompt: Prompt, max_length: int, uniforms: npt.NDArray[np.float64] | None) -> None:
        self.prompt, self._max_length, self._uniforms = prompt, max_length, uniforms
        self.tokens: list[int] = []
        self.logps: list[float] = []
        self.steps: list[int] = []
        self.entropy = 0.0
        self.stopped = False

    @property
    def has_ended(self) -> bool:
        """True if the last token is a stop token, or if the completion has its maximum length."""
        return self.stopped or len(self.tokens) == self._max_length

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and the completion."""
        return len(self.prompt.tokens) + len(self.tokens)

    @property
    def last_token(self) -> int:
        """Last token of the prompt and the completion, or token 0 as a placeholder if the completion has ended."""
        return 0 if self.has_ended else self.tokens[-1] if self.tokens else self.prompt.tokens[-1]

    @property
    def next_uniform(self) -> float:
        """Random number for the next token."""
        assert self._uniforms is not None, "the temperature is 0"
        return float(self._uniforms[len(self.tokens)])

    def append(self, token: int, logp: float, entropy: float, step: int) -> None:
        """Append a sampled token."""
        self.tokens.append(token)
        self.logps.append(logp)
        self.steps.append(step)
        self.entropy += entropy
        self.stopped = token in self.prompt.stop


class PromptInProgress:
    """Prompt whose completions are being decoded. `max_length` is the maximum number of tokens of each."""

    def __init__(self, prompt: Prompt, max_length: int, sampling: RolloutSamplingParams, step: int) -> None:
        self.completions = [
            Completion(
                prompt,
                max_length,
                np.random.default_rng((sampling.seed, step, prompt.number, index)).random(max_length)
                if sampling.temperature
                else None,
            )
            for index in range(sampling.num_generations)
        ]

    @property
    def has_ended(self) -> bool:
        """True if all completions have ended."""
        return all(completion.has_ended for completion in self.completions)

    def result(self) -> PromptCompletions:
        """Return the completions."""
        return PromptCompletions(
            tokens=[completion.tokens for completion in self.completions],
            logps=[np.array(completion.logps, np.float32) for completion in self.completions],
            stopped=[completion.stopped for completion in self.completions],
            entropy=sum(completion.entropy for completion in self.completions),
            steps=[np.array(completion.steps, np.int64) for completion in self.completions],
        )


class TokenSampler:
    """Samples tokens with the settings `sampling`."""

    def __init__(self, sampling: RolloutSamplingParams) -> None:
        self._sampling = sampling
        self._warpers = token_warpers(sampling)

    def extend(self, completions: Sequence[Completion], scores: torch.Tensor, step: int) -> None:
        """Append a token to each completion, sampled from its logits, float `[completions, vocabulary]`.

        `step` is the training step whose parameters computed the logits.
        """
        size = max(1, _MAX_ELEMENTS // scores.shape[1])
        for begin in range(0, len(completions), size):
            part = completions[begin : begin + size]
            columns = self._sample(part, scores[begin : begin + size].float())
            for completion, token, logp, entropy in zip(part, *(column.tolist() for column in columns), strict=True):
                completion.append(token, logp, entropy, step)

    def _sample(self, completions: Sequence[Completion], scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return a sampled token, its log-probability and the entropy for each row, all `[rows]` in host memory."""
        sampling = self._sampling
        logps = torch.log_softmax(scores / (sampling.temperature or 1.0), -1)
        entropies = -(logps.exp() * logps.clamp(min=torch.finfo(logps.dtype).min)).sum(-1)
        drawn = logps
        if sampling.repetition_penalty != 1:
            penalized = transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
            scores = penalized(_all_tokens(completions).to(scores.device), scores)
            drawn = torch.log_softmax(scores / (sampling.temperature or 1.0), -1)
        if sampling.temperature:
            uniforms = torch.tensor([each.next_uniform for each in completions], dtype=torch.float64)
            probabilities = self._warpers(cast(Any, None), drawn.double()).exp()
            tokens = inverse_cdf(probabilities, uniforms.to(scores.device))
        else:
            tokens = drawn.argmax(-1)
        return tokens.cpu(), logps.gather(1, tokens[:, None])[:, 0].cpu(), entropies.cpu()


def _all_tokens(completions: Sequence[Completion]) -> torch.Tensor:
    """Return the tokens of prompts and completions, int64 `[completions, longest]`, padded with their last tokens."""
    rows = [torch.tensor([*each.prompt.tokens, *each.tokens], dtype=torch.int64) for each in completions]
    longest = max(map(len, rows))
    return torch.stack([torch.cat([row, row[-1:].expand(longest - len(row))]) for row in rows])


def token_warpers(sampling: RolloutSamplingParams) -> LogitsProcessorList:
    """Return a logits processor that excludes tokens according to `top_k`, `top_p` and `min_p`."""
    warpers = LogitsProcessorList()
    if sampling.top_k:
        warpers.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(transformers.MinPLogitsWarper(sampling.min_p))
    return warpers


def inverse_cdf(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return each row's first token whose cumulative probability exceeds its uniform number times the row's sum."""
    sums = probabilities.cumsum(-1)
    tokens = torch.searchsorted(sums, (uniforms * sums[:, -1])[:, None], right=True)[:, 0]
    if (tokens == probabilities.shape[1]).any():
        # Rounding at the upper end: use the last token with a nonzero probability.
        last = probabilities.shape[1] - 1 - probabilities.flip(-1).gt(0).to(torch.int8).argmax(-1)
        tokens = torch.minimum(tokens, last)
    return tokens


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return left-padded rows of tokens and their attention mask, each int64 `[rows, longest]`."""
    tokens = [torch.tensor(list(row), dtype=torch.int64) for row in rows]
    mask = [torch.ones_like(row) for row in tokens]
    return pad_sequence(tokens, True, padding_side="left"), pad_sequence(mask, True, padding_side="left")

"""Sampling of several completions per prompt, for several prompts in one decode batch, with `generate` of transformers.

The random numbers for a completion depend on the seed, the step, the prompt and the index of the completion, but not on
the rank or on other completions in the batch. Rounding of logits depends on the batch, so only identical decode batches
are certain to yield equal tokens.

Each token is sampled with one uniform random number. Its log-probability under the policy at the sampling temperature
is stored, but the logits are not, so memory does not grow with vocabulary size times length.

The prefill of a prompt is computed once for all of its completions. Once half of the completions in a batch of 16 or
more have ended, `generate` is called again with the keys and values of the other completions.

A model that cannot do this, for example because its layers keep states, decodes one prompt's completions at a time (see
`decodes_batches`), and computes the prompt for each of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from odc_mpi.models.decoding import Prompt, generation_mode
from odc_mpi.models.quirks.caches import decodes_batches

#: Maximum number of elements in the float64 distributions that are in memory during sampling.
_MAX_ELEMENTS = 1 << 24
#: Minimum batch size for dropping rows that have ended. In smaller batches, this would hardly speed up decode steps.
_MIN_ROWS = 16


@dataclass(frozen=True)
class RolloutSamplingParams:
    """Sampling settings for rollouts. All except `seed` and `step` have the same names as settings in the section `rl`.

    A temperature of 0 selects the most likely token. `top_p` 1 and `top_k` 0 disable truncation. `seed` is the seed of
    the run. `step` is the training step, starting at 1, or 0 outside training. The random numbers depend on both.
    """

    num_generations: int
    max_completion_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    step: int = 0


class PromptCompletions(NamedTuple):
    """Completions of a prompt.

    Attributes:
        tokens: Tokens of each completion, including the stop token at the end, if any.
        logps: For each completion, the log-probabilities of its tokens before `top_k` and `top_p`, float32 `[tokens]`.
        stopped: For each completion, True if it ended with a stop token, and False if it was truncated.
        entropy: Entropy of the token distributions before `top_k` and `top_p`, in nats, summed over all tokens.
    """

    tokens: list[list[int]]
    logps: list[npt.NDArray[np.float32]]
    stopped: list[bool]
    entropy: float


#: Function that is called when all completions of a prompt have ended. Its arguments are the index of the prompt in the
#: decode batch and the completions.
OnPromptDone = Callable[[int, PromptCompletions], None]


def sample(
    module: Any,
    prompts: Sequence[Prompt],
    sampling: RolloutSamplingParams,
    on_prompt_done: OnPromptDone,
    on_token: Callable[[int], None] = lambda token: None,
) -> None:
    """Sample completions for prompts in one decode batch. One-sided if the model is sharded.

    `module` is a transformers causal language model with enough positions for the longest prompt plus
    `max_completion_length` tokens. If it does not decode batches (see `decodes_batches`), there must be one prompt.
    When all completions of a prompt have ended, `on_prompt_done` is called with the prompt's index in `prompts` and its
    completions. `on_token` is called with n = 1, 2, ... before the n-th token of each unfinished completion is sampled.
    """
    shares_cache = decodes_batches(module)
    tokens, mask = _padded(prompts)
    sampler = _TokenSampler(prompts, sampling, on_prompt_done, on_token)
    settings = {"do_sample": False, "pad_token_id": 0}
    config = module.config.get_text_config(decoder=True)
    cache = transformers.DynamicCache(config=config) if shares_cache else None
    with generation_mode(module) as decode:
        if cache is not None and tokens.shape[1] > 1:
            # Prefill once for all completions of a prompt, without the last token, with which `generate` begins.
            decode(tokens[:, :-1], mask[:, :-1], settings | {"max_new_tokens": 1}, cache=cache)
            cache.batch_repeat_interleave(sampling.num_generations)
        tokens, mask = (each.repeat_interleave(sampling.num_generations, 0) for each in (tokens, mask))
        while len(sampler.rows):
            decoded = decode(
                tokens,
                mask,
                settings | {"max_new_tokens": sampling.max_completion_length - sampler.num_sampled},
                cache=cache,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([sampler.find_stopped_rows]),
            )
            remaining = sampler.drop_finished_rows()
            if cache is not None:
                cache.batch_select_indices(remaining.to(module.device))
            added = decoded.shape[1] - tokens.shape[1]
            tokens = decoded.cpu()[remaining]
            mask = torch.nn.functional.pad(mask[remaining], (0, added), value=1)


def _padded(prompts: Sequence[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the left-padded tokens of prompts and their attention mask, each int64 `[prompts, longest]`."""
    tokens = [torch.tensor(prompt.tokens, dtype=torch.int64) for prompt in prompts]
    mask = [torch.ones_like(row) for row in tokens]
    return pad_sequence(tokens, True, padding_side="left"), pad_sequence(mask, True, padding_side="left")


class _TokenSampler(LogitsProcessor):
    """Logits processor that samples the next token of each row and sets the scores of other tokens to minus infinity.

    A row is a completion, and the rows of a prompt are consecutive. `rows` contains the indices of the rows in the
    current batch, and `done` is True for each of these rows that has ended.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        sampling: RolloutSamplingParams,
        on_prompt_done: OnPromptDone,
        on_token: Callable[[int], None],
    ) -> None:
        self._sampling, self._on_prompt_done, self._on_token = sampling, on_prompt_done, on_token
        count, length = len(prompts) * sampling.num_generations, sampling.max_completion_length
        self.rows = torch.arange(count)
        self.done = torch.zeros(count, dtype=torch.bool)
        self.num_sampled = 0
        stop = [torch.tensor(prompt.stop, dtype=torch.int64) for prompt in prompts]
        self._stop = pad_sequence(stop, True, -1).repeat_interleave(sampling.num_generations, 0)
        self._tokens = torch.zeros(count, length, dtype=torch.int64)
        self._logps = torch.zeros(count, length)
        self._entropy = torch.zeros(count, dtype=torch.float64)
        self._lengths = torch.zeros(count, dtype=torch.int64)
        self._stopped = torch.zeros(count, dtype=torch.bool)
        self._missing = [sampling.num_generations for _ in prompts]
        self._truncation = _truncation(sampling)
        self._uniforms = np.empty((0, 0))
        if sampling.temperature:
            self._uniforms = np.stack(
                [
                    np.random.default_rng((sampling.seed, sampling.step, prompt.number, completion)).random(length)
                    for prompt in prompts
                    for completion in range(sampling.num_generations)
                ]
            )

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores in which, for each row, only the score of the sampled token is finite."""
        if not self.done.all():
            self._on_token(self.num_sampled + 1)
            sampled = self._sample_tokens(scores)
            scores.fill_(-torch.inf).scatter_(1, sampled.to(scores.device)[:, None], 0.0)
        return scores

    def find_stopped_rows(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Stopping criterion of `generate`: return bool `[rows]`, True for each row that has ended.

        All are True if enough rows have ended that it is faster to call `generate` again without them.
        """
        num_remaining = len(self.done) - int(self.done.sum())
        stops_all = 2 * num_remaining <= len(self.done) and (not num_remaining or len(self.done) >= _MIN_ROWS)
        return (self.done | stops_all).to(input_ids.device)

    def drop_finished_rows(self) -> torch.Tensor:
        """Remove the rows that have ended, and return the indices that the remaining rows had in the previous batch."""
        remaining = torch.nonzero(~self.done)[:, 0]
        self.rows, self.done = self.rows[remaining], self.done[remaining]
        return remaining

    def _sample_tokens(self, scores: torch.Tensor) -> torch.Tensor:
        """Sample a token for each row that has not ended. For the other rows, return token 0 as a placeholder."""
        sampled = torch.zeros(len(self.rows), dtype=torch.int64)
        for positions in torch.nonzero(~self.done)[:, 0].split(max(1, _MAX_ELEMENTS // scores.shape[1])):
            rows = self.rows[positions]
            scores_of_rows = scores if len(positions) == len(scores) else scores[positions.to(scores.device)]
            sampled[positions], self._logps[rows, self.num_sampled], entropies = self._sample_rows(scores_of_rows, rows)
            self._entropy[rows] += entropies.double()
        rows = self.rows[~self.done]
        tokens = sampled[~self.done]
        self._tokens[rows, self.num_sampled] = tokens
        self.num_sampled += 1
        self._lengths[rows] = self.num_sampled
        self._stopped[rows] = (tokens[:, None] == self._stop[rows]).any(1)
        before, is_last = self.done, self.num_sampled == self._sampling.max_completion_length
        self.done = self._stopped[self.rows] | is_last
        for row in self.rows[self.done & ~before].tolist():
            self._end(row)
        return sampled

    def _sample_rows(self, scores: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a sampled token, its log-probability and the entropy for each row, all `[rows]` in host memory."""
        logps = torch.log_softmax(scores.float() / (self._sampling.temperature or 1.0), -1)
        probabilities = logps.exp()
        entropies = -(probabilities * logps.clamp(min=torch.finfo(logps.dtype).min)).sum(-1)
        if self._sampling.temperature:
            uniforms = torch.from_numpy(self._uniforms[rows.numpy(), self.num_sampled]).to(scores.device)
            tokens = _inverse_cdf(self._truncation(None, logps.double()).exp(), uniforms)
        else:
            tokens = logps.argmax(-1)
        return tokens.cpu(), logps.gather(1, tokens[:, None])[:, 0].cpu(), entropies.cpu()

    def _end(self, row: int) -> None:
        """Record the end of a row. When the last row of a prompt ends, pass the completions to the callback."""
        count = self._sampling.num_generations
        group = row // count
        self._missing[group] -= 1
        if not self._missing[group]:
            rows = slice(group * count, (group + 1) * count)
            lengths = self._lengths[rows].tolist()
            tokens = [each[:length].tolist() for each, length in zip(self._tokens[rows], lengths, strict=True)]
            logps = [each[:length].numpy().copy() for each, length in zip(self._logps[rows], lengths, strict=True)]
            stopped: list[bool] = self._stopped[rows].tolist()
            self._on_prompt_done(group, PromptCompletions(tokens, logps, stopped, sum(self._entropy[rows].tolist())))


def _truncation(sampling: RolloutSamplingParams) -> Callable[..., torch.Tensor]:
    """Return a logits processor that excludes tokens according to `top_k` and `top_p`."""
    warpers = LogitsProcessorList()
    if sampling.top_k:
        warpers.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(sampling.top_p))
    return warpers


def _inverse_cdf(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return each row's first token whose cumulative probability exceeds its uniform number times the row's sum."""
    sums = probabilities.cumsum(-1)
    tokens = torch.searchsorted(sums, (uniforms * sums[:, -1])[:, None], right=True)[:, 0]
    if (tokens == probabilities.shape[1]).any():
        # Rounding at the upper end: use the last token with a nonzero probability.
        last = probabilities.shape[1] - 1 - probabilities.flip(-1).gt(0).to(torch.int8).argmax(-1)
        tokens = torch.minimum(tokens, last)
    return tokens

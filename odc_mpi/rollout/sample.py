"""Several completions of several prompts at once: `sample`, by transformers' `generate`. Local, or one-sided.

The function is all that training knows of generation (`Sample`), so that an inference engine can take its place. What
is drawn for a completion depends on the seed, the step, the prompt and the completion's number, never on the rank or on
what else is decoded beside it. The logits do, by rounding: so the same completions come from the same decode batches.

Each token is drawn by one uniform number from the distribution that the policy has at this temperature, and its
log-probability under that distribution is kept. Logits are not: memory does not grow with their number times length.

A prompt goes through the model once, for all of its completions. When half of the completions have ended, the others go
on without them: `generate` is called again, with the keys and values of those that are left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from odc_mpi.models.decoding import Prompt, generation_mode

#: Elements of which a distribution is summed up at once, in float64.
_MAX_ELEMENTS = 1 << 24
#: With fewer rows than this a decode step takes about as long as with half of them.
_MIN_ROWS = 16


@dataclass(frozen=True)
class RolloutSamplingParams:
    """How the completions of prompts are drawn.

    Attributes:
        num_generations: Completions of each prompt.
        max_completion_length: The most tokens of one.
        temperature: Of the softmax; 0 takes the most likely token.
        top_p: Of the most likely tokens those that together have this probability are drawn from; 1: from all.
        top_k: So many of the most likely tokens are drawn from; 0: all.
        seed: Of the run.
        step: Of the run, from 1.
    """

    num_generations: int
    max_completion_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    step: int = 0


class PromptCompletions(NamedTuple):
    """The completions of a prompt.

    Attributes:
        tokens: Of each, a stop token at the end included.
        logps: Log-probability of each token when it was drawn, float32 [tokens] of each.
        stopped: Whether each ended by a stop token, and was not cut.
        entropy: Sum of the entropies at all tokens, in nats.
    """

    tokens: list[list[int]]
    logps: list[npt.NDArray[np.float32]]
    stopped: list[bool]
    entropy: float


#: Called with the position of a prompt among those that are decoded, as soon as its last completion has ended.
OnPromptDone = Callable[[int, PromptCompletions], None]


#: What generates: `sample`, or an inference engine; takes the arguments of `sample`.
SampleFn = Callable[[Any, Sequence[Prompt], RolloutSamplingParams, OnPromptDone, Callable[[int], None]], None]


def sample(
    module: transformers.PreTrainedModel,
    prompts: Sequence[Prompt],
    sampling: RolloutSamplingParams,
    on_prompt_done: OnPromptDone,
    on_token: Callable[[int], None] = lambda token: None,
) -> None:
    """Draw completions of prompts in one decode batch. Local; one-sided if the module is that of a sharded model.

    Args:
        module: A causal language model of transformers; of a sharded model its `module`. It must have positions for
            the longest prompt and `max_completion_length` more.
        prompts: To continue, at least one.
        sampling: How.
        on_prompt_done: Gets the completions of each prompt.
        on_token: Called with the number of each token of all completions before it is drawn, from 1.
    """
    tokens, mask = _padded(prompts)
    sampler = _TokenSampler(prompts, sampling, on_prompt_done, on_token)
    cache = transformers.DynamicCache(config=module.config.get_text_config(decoder=True))
    with generation_mode(module) as decode:
        if tokens.shape[1] > 1:
            # Once for all completions of a prompt: all of it but the last token, with which `generate` begins.
            prefill_settings = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
            decode(tokens[:, :-1], mask[:, :-1], prefill_settings, cache=cache)
            cache.batch_repeat_interleave(sampling.num_generations)
        tokens, mask = (each.repeat_interleave(sampling.num_generations, 0) for each in (tokens, mask))
        while len(sampler.rows):
            num_left = sampling.max_completion_length - sampler.num_sampled
            found = decode(
                tokens,
                mask,
                {"max_new_tokens": num_left, "do_sample": False, "pad_token_id": 0},
                cache=cache,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([_StopWhenCompactable(sampler)]),
            )
            left = sampler.drop_finished_rows()
            cache.batch_select_indices(left.to(module.device))
            added = found.shape[1] - tokens.shape[1]
            tokens = found.cpu()[left]
            mask = torch.nn.functional.pad(mask[left], (0, added), value=1)


def _padded(prompts: Sequence[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens of prompts and where they are, int64 [prompts, longest], with the padding on the left."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt.tokens) :] = torch.tensor(prompt.tokens)
        mask[row, longest - len(prompt.tokens) :] = 1
    return tokens, mask


class _TokenSampler(LogitsProcessor):
    """Draws each row's next token, which it leaves as the only one that is possible.

    A row is a completion; those of a prompt are one after the other.

    Attributes:
        rows: That are decoded now, int64 on the host.
        done: Of each of them, whether it has ended.
        num_sampled: Tokens of the rows that are not done.
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
        max_length = max(len(prompt.stop) for prompt in prompts)
        stop = torch.tensor([[*prompt.stop, *[-1] * (max_length - len(prompt.stop))] for prompt in prompts])
        self._stop = stop.to(torch.int64).repeat_interleave(sampling.num_generations, 0)
        self._tokens = torch.zeros(count, length, dtype=torch.int64)
        self._logps = torch.zeros(count, length)
        self._entropy = torch.zeros(count, dtype=torch.float64)
        self._lengths = torch.zeros(count, dtype=torch.int64)
        self._stopped = torch.zeros(count, dtype=torch.bool)
        self._missing = [sampling.num_generations for _ in prompts]
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
        """Return scores of which the drawn token's alone is finite."""
        if not self.done.all():
            self._on_token(self.num_sampled + 1)
            sampled = self._sample_tokens(scores)
            scores.fill_(-torch.inf).scatter_(1, sampled.to(scores.device)[:, None], 0.0)
        return scores

    def should_compact(self) -> bool:
        """Tell whether enough rows are done to go on without them."""
        left = len(self.done) - int(self.done.sum())
        return 2 * left <= len(self.done) and (not left or len(self.done) >= _MIN_ROWS)

    def drop_finished_rows(self) -> torch.Tensor:
        """Take rows that are done away; return the places of the others among those that were decoded."""
        left = torch.nonzero(~self.done)[:, 0]
        self.rows, self.done = self.rows[left], self.done[left]
        return left

    def _sample_tokens(self, scores: torch.Tensor) -> torch.Tensor:
        """Draw for all rows that are not done; others get token 0, which nobody looks at."""
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
        """Return tokens, their log-probabilities and the entropies, each [rows] on the host."""
        logps = torch.log_softmax(scores.float() / (self._sampling.temperature or 1.0), -1)
        probabilities = logps.exp()
        entropies = -(probabilities * logps.clamp(min=torch.finfo(logps.dtype).min)).sum(-1)
        if self._sampling.temperature:
            uniforms = torch.from_numpy(self._uniforms[rows.numpy(), self.num_sampled]).to(scores.device)
            tokens = _inverse_cdf(_truncate_distribution(probabilities, self._sampling), uniforms)
        else:
            tokens = logps.argmax(-1)
        return tokens.cpu(), logps.gather(1, tokens[:, None])[:, 0].cpu(), entropies.cpu()

    def _end(self, row: int) -> None:
        """Deliver the completions of a prompt after the last of them."""
        count = self._sampling.num_generations
        group = row // count
        self._missing[group] -= 1
        if not self._missing[group]:
            completion_rows = slice(group * count, (group + 1) * count)
            lengths = self._lengths[completion_rows].tolist()
            tokens = [
                each[:length].tolist() for each, length in zip(self._tokens[completion_rows], lengths, strict=True)
            ]
            logps = [
                each[:length].numpy().copy() for each, length in zip(self._logps[completion_rows], lengths, strict=True)
            ]
            stopped: list[bool] = self._stopped[completion_rows].tolist()
            self._on_prompt_done(
                group, PromptCompletions(tokens, logps, stopped, sum(self._entropy[completion_rows].tolist()))
            )


class _StopWhenCompactable(StoppingCriteria):
    """Ends `generate` when all rows are done, or enough of them to go on without these."""

    def __init__(self, sampler: _TokenSampler) -> None:
        self._sampler = sampler

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return of each row whether it is done."""
        done = self._sampler.done
        return (torch.ones_like(done) if self._sampler.should_compact() else done).to(input_ids.device)


def _truncate_distribution(probabilities: torch.Tensor, sampling: RolloutSamplingParams) -> torch.Tensor:
    """Return the probabilities, float64, with 0 for tokens that are not to be drawn."""
    truncated = probabilities.double()
    if 0 < sampling.top_k < truncated.shape[1]:
        truncated = truncated.masked_fill(truncated < truncated.topk(sampling.top_k).values[:, -1:], 0.0)
    if sampling.top_p < 1:
        ordered, indices = truncated.sort(-1, descending=True)
        before = (ordered.cumsum(-1) - ordered) / ordered.sum(-1, keepdim=True)
        truncated = torch.zeros_like(truncated).scatter(1, indices, ordered.masked_fill(before >= sampling.top_p, 0.0))
    return truncated


def _inverse_cdf(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the token of each row at which the sum of probabilities passes a uniform number's share."""
    sums = probabilities.cumsum(-1)
    tokens = torch.searchsorted(sums, (uniforms * sums[:, -1])[:, None], right=True)[:, 0]
    if (tokens == probabilities.shape[1]).any():
        # Rounding at the upper end: the last token that has any probability.
        last = probabilities.shape[1] - 1 - probabilities.flip(-1).gt(0).to(torch.int8).argmax(-1)
        tokens = torch.minimum(tokens, last)
    return tokens

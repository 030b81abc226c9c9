"""Several completions of several prompts at once: `sample`, by transformers' `generate`. Local, or one-sided.

The function is all that training knows of generation (`Sample`), so that an inference engine can take its place. What
is drawn for a completion depends on the seed, the step, the prompt and the completion's number, never on the rank or on
what else is decoded beside it. The logits do, by rounding: so the same completions come from the same decode batches.

Each token is drawn by one uniform number from the distribution that the policy has at this temperature, and its
log-probability under that distribution is kept. Logits are not: memory does not grow with their number times length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from odc_mpi.rollout.generate import decoding

#: Elements of which a distribution is summed up at once, in float64.
_MAX_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class GroupSampling:
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


class PromptTokens(NamedTuple):
    """What completions continue.

    Attributes:
        number: Of the prompt, which seeds its sampling.
        tokens: Not empty.
        stop: Tokens that end a completion.
    """

    number: int
    tokens: Sequence[int]
    stop: frozenset[int]


class Completions(NamedTuple):
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
Deliver = Callable[[int, Completions], None]


class Sample(Protocol):
    """What generates: `sample`, or an inference engine."""

    def __call__(
        self,
        module: Any,
        prompts: Sequence[PromptTokens],
        sampling: GroupSampling,
        deliver: Deliver,
        progress: Callable[[int], None],
    ) -> None:
        """Draw completions of all prompts, and deliver those of each prompt when they are complete."""


def sample(
    module: transformers.PreTrainedModel,
    prompts: Sequence[PromptTokens],
    sampling: GroupSampling,
    deliver: Deliver,
    progress: Callable[[int], None] = lambda token: None,
) -> None:
    """Draw completions of prompts in one decode batch. Local; one-sided if the module is that of a sharded model.

    The module's mode and settings and torch's random state are afterwards what they were before.

    Args:
        module: A causal language model of transformers; of a sharded model its `module`. It must have positions for
            the longest prompt and `max_completion_length` more.
        prompts: To continue, at least one.
        sampling: How.
        deliver: Gets the completions of each prompt.
        progress: Called with the number of each token of all completions before it is drawn, from 1.
    """
    rows = [prompt for prompt in prompts for _ in range(sampling.num_generations)]
    longest = max(len(prompt.tokens) for prompt in prompts)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(rows):
        tokens[row, longest - len(prompt.tokens) :] = torch.tensor(prompt.tokens)
        mask[row, longest - len(prompt.tokens) :] = 1
    drawing = _Drawing(prompts, sampling, deliver, progress)
    config = transformers.GenerationConfig(
        max_new_tokens=sampling.max_completion_length, do_sample=False, pad_token_id=0, use_cache=True
    )
    with torch.random.fork_rng(devices=[module.device] if module.device.type == "cuda" else []), decoding(module):
        cast(Any, module).generate(
            tokens.to(module.device),
            attention_mask=mask.to(module.device),
            generation_config=config,
            logits_processor=LogitsProcessorList([drawing]),
            stopping_criteria=StoppingCriteriaList([_Stop(drawing)]),
        )


class _Drawing(LogitsProcessor):
    """Draws each row's next token, which it leaves as the only one that is possible."""

    def __init__(
        self,
        prompts: Sequence[PromptTokens],
        sampling: GroupSampling,
        deliver: Deliver,
        progress: Callable[[int], None],
    ) -> None:
        self._sampling, self._deliver, self._progress = sampling, deliver, progress
        self._stop = [prompt.stop for prompt in prompts for _ in range(sampling.num_generations)]
        self._tokens: list[list[int]] = [[] for _ in self._stop]
        self._logps: list[list[float]] = [[] for _ in self._stop]
        self._entropy = [0.0 for _ in self._stop]
        self._stopped = [False for _ in self._stop]
        self._missing = [sampling.num_generations for _ in prompts]
        self.done = torch.zeros(len(self._stop), dtype=torch.bool)
        self._uniforms = np.empty((0, 0))
        if sampling.temperature:
            self._uniforms = np.stack(
                [
                    np.random.default_rng((sampling.seed, sampling.step, prompt.number, completion)).random(
                        sampling.max_completion_length
                    )
                    for prompt in prompts
                    for completion in range(sampling.num_generations)
                ]
            )
        self._step = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores of which the drawn token's alone is finite. Local."""
        if not self.done.all():
            self._progress(self._step + 1)
            drawn = self._draw(scores)
            scores.fill_(-torch.inf).scatter_(1, drawn.to(scores.device)[:, None], 0.0)
            self._step += 1
        return scores

    def _draw(self, scores: torch.Tensor) -> torch.Tensor:
        """Draw for all rows that are not done; others get token 0, which nobody looks at."""
        drawn = torch.zeros(len(self._stop), dtype=torch.int64)
        rows = torch.nonzero(~self.done)[:, 0]
        ended: list[int] = []
        for part in rows.split(max(1, _MAX_ELEMENTS // scores.shape[1])):
            tokens, logps, entropies = self._draw_rows(scores[part.to(scores.device)], part)
            drawn[part] = tokens
            for row, token, logp, entropy in zip(
                part.tolist(), tokens.tolist(), logps.tolist(), entropies.tolist(), strict=True
            ):
                self._tokens[row].append(token)
                self._logps[row].append(logp)
                self._entropy[row] += entropy
                self._stopped[row] = token in self._stop[row]
                if self._stopped[row] or self._step + 1 == self._sampling.max_completion_length:
                    ended.append(row)
        self.done[ended] = True
        for row in ended:
            self._end(row)
        return drawn

    def _draw_rows(self, scores: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, their log-probabilities and the entropies, each [rows] on the host."""
        logps = torch.log_softmax(scores.float() / (self._sampling.temperature or 1.0), -1)
        probabilities = logps.exp()
        entropies = -(probabilities * logps.clamp(min=torch.finfo(logps.dtype).min)).sum(-1)
        if self._sampling.temperature:
            uniforms = torch.from_numpy(self._uniforms[rows.numpy(), self._step]).to(scores.device)
            tokens = _inverse(_kept(probabilities, self._sampling), uniforms)
        else:
            tokens = logps.argmax(-1)
        return tokens.cpu(), logps.gather(1, tokens[:, None])[:, 0].cpu(), entropies.cpu()

    def _end(self, row: int) -> None:
        """Deliver the completions of a prompt after the last of them."""
        count = self._sampling.num_generations
        group = row // count
        self._missing[group] -= 1
        if not self._missing[group]:
            own = slice(group * count, (group + 1) * count)
            logps = [np.array(values, dtype=np.float32) for values in self._logps[own]]
            found = Completions(self._tokens[own], logps, self._stopped[own], sum(self._entropy[own]))
            self._deliver(group, found)


class _Stop(StoppingCriteria):
    """Ends generation when all rows are done."""

    def __init__(self, drawing: _Drawing) -> None:
        self._drawing = drawing

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return of each row whether it is done. Local."""
        return self._drawing.done.to(input_ids.device)


def _kept(probabilities: torch.Tensor, sampling: GroupSampling) -> torch.Tensor:
    """Return the probabilities, float64, with 0 for tokens that are not to be drawn."""
    kept = probabilities.double()
    if 0 < sampling.top_k < kept.shape[1]:
        kept = kept.masked_fill(kept < kept.topk(sampling.top_k).values[:, -1:], 0.0)
    if sampling.top_p < 1:
        ordered, indices = kept.sort(-1, descending=True)
        before = (ordered.cumsum(-1) - ordered) / ordered.sum(-1, keepdim=True)
        kept = torch.zeros_like(kept).scatter(1, indices, ordered.masked_fill(before >= sampling.top_p, 0.0))
    return kept


def _inverse(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the token of each row at which the sum of probabilities passes a uniform number's share."""
    sums = probabilities.cumsum(-1)
    tokens = torch.searchsorted(sums, (uniforms * sums[:, -1])[:, None], right=True)[:, 0]
    # Rounding at the upper end: the last token that has any probability.
    last = probabilities.shape[1] - 1 - probabilities.flip(-1).gt(0).to(torch.int8).argmax(-1)
    return torch.minimum(tokens, last)

"""Decoding of several completions per prompt, for several prompts at a time, one token for all of them at a time.

The prefill of a prompt is computed once for all of its completions. When completions have ended, other prompts take
their place in the batch. Until then, a batch of 16 or more continues without the ended ones, as soon as their rows have
cost as much as copying the cache without them. Decoding can be interrupted between two tokens, and go on with other
parameters.

Rounding of logits depends on the batch, so only identical batches are certain to yield equal tokens.

A model whose rows cannot be padded or share the cache of a prompt, for example because its layers keep states, decodes
one prompt at a time with `generate` of transformers (see `PromptDecoder`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch.nn.functional import pad
from transformers import LogitsProcessorList, StoppingCriteriaList
from typing_extensions import override

from odc_mpi.models.decoding import CachedForward, Prompt, generation_mode, max_new_tokens_for, run_generate
from odc_mpi.models.quirks.caches import append_rows, decodes_batches, drop_columns
from odc_mpi.rollout.sampling import (
    Completion,
    PromptCompletions,
    PromptInProgress,
    RolloutSamplingParams,
    TokenSampler,
    left_padded,
)

#: Minimum batch size for dropping rows that have ended. In smaller batches, this would hardly speed up decode steps.
_MIN_ROWS = 16
#: Decode steps' worth of rows that may have been computed for ended completions before they are dropped, or been empty
#: before other prompts are added. Dropping and adding copy the cache, which takes about as long.
_DROP_STEPS, _ADD_STEPS = 0.25, 2.0
#: Maximum number of tokens of a prefill in `Decoder.recompute`.
_MAX_PREFILL_TOKENS = 1 << 14

#: Function that is called when all completions of a prompt have ended, with the key of the prompt and the completions.
OnPromptDone = Callable[[int, PromptCompletions], None]


class PromptBatch(ABC):
    """Prompts whose completions are decoded together. `add` and `step` must be called in `generation_mode`.

    Args:
        module: transformers causal language model, or the `module` of a sharded one. Its parameters may change between
            two calls of `step`.
        sampling: Settings.
        max_prompts: Maximum number of prompts, at least 1. There may be more prompts once some of their completions
            have ended, but never more unfinished completions than this number of prompts has.
        on_prompt_done: Function that `step` calls when all completions of a prompt have ended.
    """

    def __init__(
        self, module: Any, sampling: RolloutSamplingParams, max_prompts: int, on_prompt_done: OnPromptDone
    ) -> None:
        self.module, self._sampling = module, sampling
        self._max_prompts, self._on_prompt_done = max_prompts, on_prompt_done
        self._sampler = TokenSampler(sampling)
        #: Prompts in progress, keyed as in `add`.
        self.prompts: dict[int, PromptInProgress] = {}

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Number of prompts that `add` should take now, or 0 if it is better to call `step` first."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the longest completion in progress."""
        return max((len(each.tokens) for prompt in self.prompts.values() for each in prompt.completions), default=0)

    @abstractmethod
    def add(self, prompts: Mapping[int, Prompt], step: int) -> None:
        """Start the completions of prompts, which training step `step` will train. One-sided if the model is sharded.

        Keys must differ from those of all prompts in progress. The random numbers of a completion depend on `step`. A
        completion is limited to fewer than `max_completion_length` tokens if the model has too few positions. Raises
        `UserError` if a prompt does not fit (see `max_new_tokens_for`). Call this only if `num_free` is not 0.
        """

    @abstractmethod
    def step(self, step: int, on_token: Callable[[int], None] = lambda token: None) -> None:
        """Sample the next token, or all tokens, of each completion in progress. One-sided if the model is sharded.

        `step` is the current training step, which is recorded with the tokens. `on_token` is called before tokens are
        sampled, with the number of tokens that the longest completion will have.
        """

    def _start(self, prompts: Mapping[int, Prompt], step: int) -> list[Completion]:
        sampling, started = self._sampling, {}
        for key, prompt in prompts.items():
            max_length = min(sampling.max_completion_length, max_new_tokens_for(self.module, prompt))
            started[key] = PromptInProgress(prompt, max_length, sampling, step)
        self.prompts |= started
        return [completion for prompt in started.values() for completion in prompt.completions]

    def _finish_prompts(self) -> None:
        for key in [key for key, prompt in self.prompts.items() if prompt.has_ended]:
            self._on_prompt_done(key, self.prompts.pop(key).result())


class Decoder(PromptBatch):
    """Batch with a cache, in which prompts can be added at any time. The model must decode batches."""

    def __init__(
        self, module: Any, sampling: RolloutSamplingParams, max_prompts: int, on_prompt_done: OnPromptDone
    ) -> None:
        super().__init__(module, sampling, max_prompts, on_prompt_done)
        self._forward = CachedForward(module)
        self._rows: Sequence[Completion] = ()
        self._num_ended = self._num_empty = 0  # since rows were last dropped, and since prompts were last added
        self._mask = torch.empty(0, 0, dtype=torch.int64)  # of the tokens in the cache

    @property
    @override
    def num_free(self) -> int:
        num_free = self._max_prompts + -len(self._active_rows()) // self._sampling.num_generations
        return num_free if not self.prompts or self._num_empty >= _ADD_STEPS * self._max_rows else 0

    @property
    def _max_rows(self) -> int:
        return self._max_prompts * self._sampling.num_generations

    @override
    def add(self, prompts: Mapping[int, Prompt], step: int) -> None:
        rows, self._num_empty = self._start(prompts, step), 0
        cache, mask = self._prefill([prompt.tokens[:-1] for prompt in prompts.values()])
        cache.batch_repeat_interleave(self._sampling.num_generations)
        self._select(self._active_rows())
        self._append(rows, cache, mask.repeat_interleave(self._sampling.num_generations, 0))

    @override
    def step(self, step: int, on_token: Callable[[int], None] = lambda token: None) -> None:
        on_token(self.num_tokens + 1)
        active = self._active_rows()
        self._num_empty += self._max_rows - len(active)
        if self._drops(len(active)):
            self._select(active)
            active = self._active_rows()
        self._mask = pad(self._mask, (0, 1), value=1)
        last = torch.tensor([[row.last_token] for row in self._rows])
        logits = self._forward.next_logits(last, self._mask, self._cache)
        if len(active) < len(self._rows):
            logits = logits[torch.tensor(active, device=logits.device)]
        self._sampler.extend([self._rows[i] for i in active], logits, step)
        self._finish_prompts()
        if not self.prompts:
            self._select([])

    def _drops(self, num_active: int) -> bool:
        """Return True if rows that have ended should be dropped now."""
        num_ended = len(self._rows) - num_active
        self._num_ended += num_ended
        if len(self._rows) < _MIN_ROWS or not num_ended:
            return False
        if self._max_prompts == 1:  # as in exact runs, whose bits depend on the rows of the batch
            return 2 * num_active <= len(self._rows)
        return self._num_ended >= _DROP_STEPS * len(self._rows)

    def recompute(self) -> None:
        """Compute the keys and values of all completions in progress again, with the current parameters.

        One-sided if the model is sharded. The recorded log-probabilities do not change.
        """
        rows = [self._rows[i] for i in self._active_rows()]
        self._select([])
        begin = 0
        while begin < len(rows):
            longest, end = 0, begin
            while end < len(rows) and (
                end == begin or (end + 1 - begin) * max(longest, rows[end].num_tokens) <= _MAX_PREFILL_TOKENS
            ):
                longest, end = max(longest, rows[end].num_tokens), end + 1
            part = rows[begin:end]
            self._append(part, *self._prefill([[*row.prompt.tokens, *row.tokens][:-1] for row in part]))
            begin = end

    def _active_rows(self) -> list[int]:
        return [i for i, row in enumerate(self._rows) if not row.has_ended]

    def _prefill(self, prefixes: Sequence[Sequence[int]]) -> tuple[transformers.DynamicCache, torch.Tensor]:
        """Return a new cache of left-padded tokens, and their mask."""
        cache = transformers.DynamicCache(config=self.module.config.get_text_config(decoder=True))
        tokens, mask = left_padded(prefixes)
        if tokens.shape[1]:
            self._forward.next_logits(tokens, mask, cache)
        return cache, mask

    def _select(self, indices: list[int]) -> None:
        """Keep only the rows `indices`, and the columns that they use."""
        self._num_ended = 0
        if not indices:
            self._rows = ()
        elif len(indices) < len(self._rows):
            self._cache.batch_select_indices(torch.tensor(indices, device=self._forward.device))
            self._rows, self._mask = [self._rows[i] for i in indices], self._mask[indices]
            if unused := int(self._mask.argmax(1).min()) if self._mask.any(1).all() else 0:
                drop_columns(self._cache, unused)
                self._mask = self._mask[:, unused:]

    def _append(self, rows: Sequence[Completion], cache: transformers.DynamicCache, mask: torch.Tensor) -> None:
        if not self._rows:
            self._rows, self._cache, self._mask = rows, cache, mask
            return
        append_rows(self._cache, len(self._rows), cache, len(rows))
        length = max(self._mask.shape[1], mask.shape[1])
        self._mask = torch.cat([pad(each, (length - each.shape[1], 0)) for each in (self._mask, mask)])
        self._rows = [*self._rows, *rows]


class PromptDecoder(PromptBatch):
    """Batch of one prompt, which `step` decodes to its end with `generate` of transformers."""

    @property
    @override
    def num_free(self) -> int:
        return 0 if self.prompts else 1

    @override
    def add(self, prompts: Mapping[int, Prompt], step: int) -> None:
        assert len(prompts) + len(self.prompts) == 1, "one prompt at a time"
        self._rows = self._start(prompts, step)

    @override
    def step(self, step: int, on_token: Callable[[int], None] = lambda token: None) -> None:
        rows = self._rows
        tokens = torch.tensor([list(row.prompt.tokens) for row in rows])
        while rows:

            def sample(input_ids: torch.Tensor, scores: torch.Tensor, rows: list[Completion] = rows) -> torch.Tensor:
                """Logits processor that leaves only the score of the sampled token of each row finite."""
                active = [i for i, row in enumerate(rows) if not row.has_ended]
                if active:
                    on_token(self.num_tokens + 1)
                    self._sampler.extend([rows[i] for i in active], scores[active], step)
                last = torch.tensor([[row.tokens[-1] if i in active else 0] for i, row in enumerate(rows)])
                return scores.fill_(-torch.inf).scatter_(1, last.to(scores.device), 0.0)

            def ended(input_ids: torch.Tensor, scores: Any, rows: list[Completion] = rows, **_: Any) -> torch.Tensor:
                """Stopping criterion: rows that have ended, or all rows if it is faster to go on without them."""
                has_ended = torch.tensor([row.has_ended for row in rows], device=input_ids.device)
                num_active = len(rows) - int(has_ended.sum())
                return has_ended | (2 * num_active <= len(rows) and (not num_active or len(rows) >= _MIN_ROWS))

            run_generate(
                self.module,
                tokens,
                torch.ones_like(tokens),
                {"do_sample": False, "pad_token_id": 0, "max_new_tokens": self._sampling.max_completion_length},
                logits_processor=LogitsProcessorList([sample]),
                stopping_criteria=StoppingCriteriaList([ended]),
            )
            rows = [row for row in rows if not row.has_ended]
            if rows:
                tokens = torch.tensor([[*row.prompt.tokens, *row.tokens] for row in rows])
        self._finish_prompts()


def prompt_batch(
    module: Any, sampling: RolloutSamplingParams, max_prompts: int, on_prompt_done: OnPromptDone
) -> PromptBatch:
    """Return a `Decoder`, or a `PromptDecoder` for a model that does not decode batches."""
    kind = Decoder if decodes_batches(module) else PromptDecoder
    return kind(module, sampling, max_prompts, on_prompt_done)


def decode_claimed(
    batch: PromptBatch,
    claim: Callable[[int], Mapping[int, Prompt]],
    step: int,
    on_token: Callable[[int], None] = lambda token: None,
) -> None:
    """Decode prompts for training step `step`, or 0 outside training, until all have ended. One-sided if sharded.

    `claim` returns up to the given number of prompts, keyed as in `PromptBatch.add`; fewer, if no more are left.
    """
    has_more = True
    with generation_mode(batch.module):
        while batch.prompts or has_more:
            if has_more and (num_free := batch.num_free):
                claimed = claim(num_free)
                has_more = len(claimed) == num_free
                if claimed:
                    batch.add(claimed, step)
            if batch.prompts:
                batch.step(step, on_token)


def sample(
    module: Any,
    prompts: Sequence[Prompt],
    sampling: RolloutSamplingParams,
    on_prompt_done: OnPromptDone,
    step: int = 0,
    on_token: Callable[[int], None] = lambda token: None,
) -> None:
    """Decode completions of all `prompts`, whose keys for `on_prompt_done` are their indices. One-sided if sharded."""
    waiting = list(enumerate(prompts))[::-1]

    def claim(count: int) -> dict[int, Prompt]:
        return dict(waiting.pop() for _ in range(min(count, len(waiting))))

    decode_claimed(prompt_batch(module, sampling, len(prompts), on_prompt_done), claim, step, on_token)

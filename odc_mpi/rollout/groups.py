"""Prompt groups with sampled completions, and their packing into microbatches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from odc_mpi.data.microbatch import Microbatch, packed_inputs


class PromptGroup(NamedTuple):
    """A prompt group: the tokens of the completions of one prompt with their advantages.

    Attributes:
        position, prompt_index: Index of the prompt in the minibatch, and in the prompt file.
        logps: Log-probabilities of the tokens of each completion when they were sampled, float32 `[tokens]`.
        advantages: Advantage of each completion, float64 `[completions]`.
        excluded: True for each completion that is excluded from the loss, bool `[completions]`.
    """

    position: int
    prompt_index: int
    prompt: list[int]
    completions: list[list[int]]
    logps: list[npt.NDArray[np.float32]]
    advantages: npt.NDArray[np.float64]
    excluded: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class RolloutMicrobatch(Microbatch):
    """A microbatch of completions. `inputs` contains no labels. The loss tokens are those of the completions.

    The first sequence of a prompt group is the prompt with a completion; the others are completions that share the
    prompt (see `packed_inputs`).

    Attributes:
        sequence: For each target, the index of its sequence in the microbatch, int64 `[K]`.
        logps: Log-probability of each target when it was sampled, float32 `[K]`.
        advantages: Advantage of each sequence, float64 `[num_sequences]`.
    """

    sequence: torch.Tensor
    logps: torch.Tensor
    advantages: torch.Tensor


def pack_microbatches(
    groups: Sequence[PromptGroup], max_tokens: int, *, with_all: bool, packs: bool = True
) -> Iterator[RolloutMicrobatch]:
    """Pack the completions of prompt groups into microbatches of at most `max_tokens`, without excluded completions.

    The completions of a group share their prompt in each microbatch. `with_all` includes completions with an advantage
    of 0. Without `packs`, each microbatch has one completion.
    """
    chosen: list[tuple[PromptGroup, int]] = []
    num_tokens = 0
    for group in groups:
        for i, completion in enumerate(group.completions):
            if group.excluded[i] or not (with_all or group.advantages[i]):
                continue
            shares = bool(chosen) and chosen[-1][0] is group
            length = len(completion) + (0 if shares else len(group.prompt))
            if chosen and (not packs or num_tokens + length > max_tokens):
                yield _pack_microbatch(chosen)
                chosen, num_tokens, length = [], 0, len(group.prompt) + len(completion)
            chosen.append((group, i))
            num_tokens += length
    if chosen:
        yield _pack_microbatch(chosen)


def _pack_microbatch(chosen: Sequence[tuple[PromptGroup, int]]) -> RolloutMicrobatch:
    tokens: list[int] = []
    lengths, shared_prompts, logit_positions, before = [], [], [], None
    for group, i in chosen:
        completion, shares = group.completions[i], group is before
        begin, before = len(tokens), group
        if not shares:
            tokens += group.prompt
            end_of_prompt = len(tokens)
        # The last token of the prompt predicts the first one of each completion.
        logit_positions += [end_of_prompt - 1, *range(len(tokens), len(tokens) + len(completion) - 1)]
        tokens += completion
        lengths.append(len(tokens) - begin)
        shared_prompts.append(len(group.prompt) if shares else 0)
    completions = [group.completions[i] for group, i in chosen]
    num_targets = [len(completion) for completion in completions]
    return RolloutMicrobatch(
        packed_inputs(np.array(tokens), lengths, shared_prompts),
        sum(num_targets),
        len(tokens),
        np.array(sorted({group.prompt_index for group, _ in chosen})),
        torch.tensor(logit_positions),
        torch.tensor([token for completion in completions for token in completion]),
        sequence=torch.from_numpy(np.repeat(np.arange(len(chosen)), num_targets)),
        logps=torch.from_numpy(np.concatenate([group.logps[i] for group, i in chosen])),
        advantages=torch.tensor([float(group.advantages[i]) for group, i in chosen], dtype=torch.float64),
    )

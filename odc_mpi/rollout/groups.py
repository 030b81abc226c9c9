"""Prompts with groups of sampled completions, and packing of these completions into microbatches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from odc_mpi.data.microbatch import Microbatch, packed_inputs


class PromptGroup(NamedTuple):
    """Prompt and its sampled completions, all as tokens, with the completions' advantages.

    Attributes:
        position, prompt_index: Index of the prompt in the minibatch, and its index in the prompt file.
        logps: For each completion, the log-probabilities of its tokens under the sampling policy, float32 `[tokens]`.
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
    """Microbatch of sequences, each of which consists of a prompt and a completion. `inputs` contains no labels.

    The loss tokens (targets) are the K tokens of the completions.

    Attributes:
        sequence: For each target, the index of its sequence in the microbatch, int64 `[K]`.
        logps: Log-probability of each target under the sampling policy, float32 `[K]`.
        advantages: Advantage of each sequence, float64 `[num_sequences]`.
    """

    sequence: torch.Tensor
    logps: torch.Tensor
    advantages: torch.Tensor


def pack_microbatches(
    groups: Sequence[PromptGroup], max_tokens: int, *, with_all: bool, packs: bool = True
) -> Iterator[RolloutMicrobatch]:
    """Pack sequences (prompt plus completion) into microbatches of at most `max_tokens` tokens, and yield them.

    Excluded completions are omitted, and so are completions with an advantage of 0 unless `with_all` is True. A
    sequence of more than `max_tokens` tokens gets its own microbatch, as does every sequence if `packs` is False.
    """
    chosen: list[tuple[PromptGroup, int]] = []
    num_tokens = 0
    for group in groups:
        for i, completion in enumerate(group.completions):
            if group.excluded[i] or not (with_all or group.advantages[i]):
                continue
            length = len(group.prompt) + len(completion)
            if chosen and (not packs or num_tokens + length > max_tokens):
                yield _pack_microbatch(chosen)
                chosen, num_tokens = [], 0
            chosen.append((group, i))
            num_tokens += length
    if chosen:
        yield _pack_microbatch(chosen)


def _pack_microbatch(chosen: Sequence[tuple[PromptGroup, int]]) -> RolloutMicrobatch:
    completions = [group.completions[i] for group, i in chosen]
    num_targets = [len(completion) for completion in completions]
    lengths = [len(group.prompt) + count for (group, _), count in zip(chosen, num_targets, strict=True)]
    ends = np.cumsum(lengths)
    # The logits at a position predict the next token.
    logit_positions = [np.arange(end - count - 1, end - 1) for end, count in zip(ends, num_targets, strict=True)]
    tokens = [token for group, i in chosen for token in (*group.prompt, *group.completions[i])]
    return RolloutMicrobatch(
        packed_inputs(np.array(tokens), lengths),
        sum(num_targets),
        sum(lengths),
        np.array(sorted({group.prompt_index for group, _ in chosen})),
        torch.from_numpy(np.concatenate(logit_positions)),
        torch.tensor([token for completion in completions for token in completion]),
        sequence=torch.from_numpy(np.repeat(np.arange(len(chosen)), num_targets)),
        logps=torch.from_numpy(np.concatenate([group.logps[i] for group, i in chosen])),
        advantages=torch.tensor([float(group.advantages[i]) for group, i in chosen], dtype=torch.float64),
    )

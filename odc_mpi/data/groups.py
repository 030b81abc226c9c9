"""Microbatches of prompts with their answers, in which the tokens of each prompt are computed once."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.microbatch import Microbatch, packed_inputs
from odc_mpi.data.prompt_group import Answer, PromptGroup, read_group


@dataclass(frozen=True, kw_only=True)
class GroupMicrobatch(Microbatch):
    """A microbatch of groups.

    Each group is packed as a sequence per answer: the prompt with the first answer, followed by the other answers,
    which share the prompt (see `packed_inputs`). The last token of the prompt predicts the first token of each answer.

    Attributes:
        answers: Index, among the answers of all groups, of the answer that contains each target, int64 `[K]`.
        columns: Columns of all answers: values per answer, or values `[K]` per target.
    """

    answers: torch.Tensor
    columns: dict[str, torch.Tensor] = field(default_factory=dict)


def read_groups(dataset: Dataset, indices: npt.NDArray[np.int64]) -> GroupMicrobatch:
    """Read the pairs or the answers with labels at `indices`, a nonempty int64 `[n]` array, as a microbatch."""
    return pack_groups([read_group(dataset, index) for index in indices.tolist()])


def group_microbatches(
    groups: Iterable[PromptGroup], max_tokens: int, *, packs: bool = True
) -> Iterator[GroupMicrobatch]:
    """Pack groups in order into microbatches of at most `max_tokens` tokens, and yield them.

    A group of more than `max_tokens` tokens is split. If `packs` is False, each microbatch has a single answer.
    """
    max_tokens = max_tokens if packs else 0
    chosen: list[PromptGroup] = []
    for group in groups:
        for part in group.split(max_tokens):
            if chosen and sum(each.num_tokens for each in (*chosen, part)) > max_tokens:
                yield pack_groups(chosen)
                chosen = []
            chosen.append(part)
    if chosen:
        yield pack_groups(chosen)


def pack_groups(groups: Sequence[PromptGroup]) -> GroupMicrobatch:
    """Pack one or more groups into a microbatch."""
    tokens: list[npt.NDArray] = []
    lengths, prompts, logit_positions, begin = [], [], [], 0
    for group in groups:
        num_prompt = len(group.prompt)
        tokens.append(group.prompt)
        begin += num_prompt
        last_of_prompt = begin - 1
        for i, answer in enumerate(group.answers):
            loss = np.flatnonzero(answer.loss_mask)
            logit_positions.append(np.where(loss == 0, last_of_prompt, begin + loss - 1))
            tokens.append(answer.tokens)
            lengths.append(len(answer.tokens) + (0 if i else num_prompt))
            prompts.append(num_prompt if i else 0)
            begin += len(answer.tokens)
    answers = [answer for group in groups for answer in group.answers]
    targets = [answer.tokens[answer.loss_mask].astype(np.int64) for answer in answers]
    num_targets = [len(each) for each in targets]
    return GroupMicrobatch(
        packed_inputs(np.concatenate(tokens).astype(np.int64), lengths, prompts),
        sum(num_targets),
        begin,
        np.array([group.index for group in groups]),
        torch.from_numpy(np.concatenate(logit_positions)),
        torch.from_numpy(np.concatenate(targets)),
        answers=torch.from_numpy(np.repeat(np.arange(len(targets)), num_targets)),
        columns={name: torch.from_numpy(_column(answers, name)) for name in answers[0].columns},
    )


def _column(answers: Sequence[Answer], name: str) -> npt.NDArray:
    values = ((answer.columns[name], answer.loss_mask) for answer in answers)
    return np.concatenate([value[loss_mask] if value.ndim else value[None] for value, loss_mask in values])


def as_padded_rows(microbatch: GroupMicrobatch) -> GroupMicrobatch:
    """Return a microbatch of one group as padded rows, in each of which an answer follows its own copy of the prompt.

    The rows are for causal models whose attention does not support a shared prompt. In the result, `inputs` contains
    only `input_ids`, int64 `[num_answers, length]`, and `use_cache`. `logit_positions` are indices into the flattened
    rows. In a causal model, the padding at the end needs no mask.
    """
    tokens = microbatch.inputs["input_ids"][0]
    starts, prompts = _starts_and_prompts(microbatch)
    num_prompt = int(prompts.max())
    assert (prompts > 0).sum() == len(prompts) - 1, "expected one group"
    first, *others = tokens.tensor_split(starts[1:].cpu())
    padded = torch.nn.utils.rnn.pad_sequence(
        [first, *(torch.cat([tokens[:num_prompt], answer]) for answer in others)], batch_first=True
    )
    positions, answers = microbatch.logit_positions, microbatch.answers
    # The index in the row, where each answer follows its own copy of the prompt.
    in_row = torch.where(positions < num_prompt, positions, positions - starts[answers] + prompts[answers])
    return replace(
        microbatch, inputs={"input_ids": padded, "use_cache": False}, logit_positions=answers * padded.shape[1] + in_row
    )


def select_last_tokens(microbatch: GroupMicrobatch, padding: int) -> GroupMicrobatch:
    """Return a copy of the microbatch with one target per answer: the answer's last token that differs from `padding`.

    If the answer has no such token, the target is the last such token of the prompt, or else the first token of the
    group. `logit_positions` are the positions of the targets themselves, at which a transformers sequence classifier
    computes its output. `num_tokens` does not change.
    """
    tokens = microbatch.inputs["input_ids"][0]
    starts, prompts = _starts_and_prompts(microbatch)
    group_starts = torch.where(prompts > 0, 0, starts).cummax(0).values
    # The last tokens of the shared prompts. First answers include their prompts.
    prompt_ends = group_starts + (prompts - 1).clamp(min=0)
    indices = torch.arange(len(tokens), device=tokens.device)
    # For each position, the index of the last token up to it that is not padding.
    last = torch.where(tokens == padding, -1, indices).cummax(0).values
    sequence_ends = last[torch.cat([starts[1:] - 1, indices[-1:]])]
    positions = torch.maximum(torch.where(sequence_ends < starts, last[prompt_ends], sequence_ends), group_starts)
    return replace(microbatch, logit_positions=positions, targets=tokens[positions], answers=indices[: len(positions)])


def _starts_and_prompts(microbatch: GroupMicrobatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the position of each sequence, and its number of shared prompt tokens, both int64 `[num_answers]`."""
    device = microbatch.targets.device
    bounds, key_bounds = (
        microbatch.inputs[f"cu_seq_lens_{name}"].to(device, torch.int64, non_blocking=True) for name in "qk"
    )
    return bounds[:-1], key_bounds.diff() - bounds.diff()

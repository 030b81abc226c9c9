"""Microbatches of pairs whose two answers share the tokens of their prompt."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.microbatch import Microbatch, packed_inputs


@dataclass(frozen=True, kw_only=True)
class PairMicrobatch(Microbatch):
    """A microbatch of pairs.

    Each pair is packed as two sequences: the prompt with the chosen answer, followed by the rejected answer, which
    shares the prompt (see `packed_inputs`). The last token of the prompt predicts the first token of each answer.

    Attributes:
        answers: Index of the answer that contains each target, int64 `[K]`: `2 * i` for the chosen answer of pair `i`,
            and `2 * i + 1` for its rejected answer.
    """

    answers: torch.Tensor


def read_pairs(dataset: Dataset, indices: npt.NDArray[np.int64]) -> PairMicrobatch:
    """Read the pairs at `indices`, a nonempty int64 [num_pairs] array, as a microbatch."""
    assert dataset.pair_counts is not None
    rows, lengths, prompts, logit_positions, targets, begin = [], [], [], [], [], 0
    for index in indices:
        tokens, loss_mask = dataset[index]
        num_prompt, num_chosen, _ = dataset.pair_counts[index].tolist()
        middle = num_prompt + num_chosen
        for start, stop in ((num_prompt, middle), (middle, len(tokens))):
            loss = start + np.flatnonzero(loss_mask[start:stop])
            logit_positions.append(begin + np.where(loss == start, num_prompt, loss) - 1)
            targets.append(tokens[loss])
        rows.append(tokens)
        lengths += [middle, len(tokens) - middle]
        prompts += [0, num_prompt]
        begin += len(tokens)
    num_targets = [len(each) for each in targets]
    return PairMicrobatch(
        packed_inputs(np.concatenate(rows), lengths, prompts),
        sum(num_targets),
        begin,
        indices,
        torch.from_numpy(np.concatenate(logit_positions)),
        torch.from_numpy(np.concatenate(targets)),
        answers=torch.from_numpy(np.repeat(np.arange(len(targets)), num_targets)),
    )


def as_padded_rows(microbatch: PairMicrobatch) -> PairMicrobatch:
    """Return a microbatch of one pair as two padded rows: each answer follows its own copy of the prompt.

    The rows are for causal models whose attention does not support a shared prompt. In the result, `inputs` contains
    only `input_ids`, int64 `[2, length]`, and `use_cache`. `logit_positions` are indices into the flattened rows. In a
    causal model, the padding at the end needs no mask.
    """
    tokens = microbatch.inputs["input_ids"][0]
    bounds, key_bounds = (microbatch.inputs[f"cu_seq_lens_{name}"].tolist() for name in "qk")
    assert len(bounds) == 3, f"expected one pair, got {len(bounds) // 2}"
    split, num_prompt = bounds[1], key_bounds[2] - bounds[2]
    rows = [tokens[:split], torch.cat([tokens[:num_prompt], tokens[split:]])]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    positions = microbatch.logit_positions
    # The index in the second row, where the rejected answer follows its own copy of the prompt.
    in_second_row = torch.where(positions < num_prompt, positions, positions - split + num_prompt)
    rejected = microbatch.answers % 2 == 1
    return replace(
        microbatch,
        inputs={"input_ids": padded, "use_cache": False},
        logit_positions=torch.where(rejected, padded.shape[1] + in_second_row, positions),
    )


def select_last_tokens(microbatch: PairMicrobatch, padding: int) -> PairMicrobatch:
    """Return a copy of the microbatch with one target per answer: the answer's last token that differs from `padding`.

    If the answer has no such token, the target is the last such token of the prompt, or else the first token of the
    pair. `logit_positions` are the positions of the targets themselves, at which a transformers sequence classifier
    computes its output. `num_tokens` does not change.
    """
    tokens = microbatch.inputs["input_ids"][0]
    bounds, bounds_k = (
        microbatch.inputs[f"cu_seq_lens_{name}"].to(tokens.device, torch.int64, non_blocking=True) for name in "qk"
    )
    starts = bounds[:-1]
    pair_starts = starts[::2].repeat_interleave(2)
    # The last tokens of the prompts of rejected answers. Chosen answers include their prompts.
    prompt_ends = pair_starts + (bounds_k.diff() - bounds.diff() - 1).clamp(min=0)
    indices = torch.arange(len(tokens), device=tokens.device)
    # For each position, the index of the last token up to it that is not padding.
    last = torch.where(tokens == padding, -1, indices).cummax(0).values
    sequence_ends = last[bounds[1:] - 1]
    positions = torch.maximum(torch.where(sequence_ends < starts, last[prompt_ends], sequence_ends), pair_starts)
    return replace(microbatch, logit_positions=positions, targets=tokens[positions], answers=indices[: len(positions)])

"""Microbatches of pairs, in which the two answers share the tokens of their prompt."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.microbatch import Microbatch, packed_inputs


@dataclass(frozen=True, kw_only=True)
class PairMicrobatch(Microbatch):
    """A microbatch of pairs. `inputs` contains no labels.

    The tokens of each pair are two sequences: the prompt with the chosen answer, and the rejected answer, which shares
    the prompt (see `packed_inputs`). The last token of the prompt predicts the first token of both answers.
    `indices` are those of the pairs.

    Attributes:
        answers: For each target, the index of its answer, int64 `[K]`: 2 i for the chosen answer of the i-th pair, and
            2 i + 1 for the rejected one.
    """

    answers: torch.Tensor

    def to(self, device: torch.device) -> "PairMicrobatch":
        """Return the microbatch with its tensors on `device`. The bounds of the sequences stay on the host."""
        moved = super().to(device)
        assert isinstance(moved, PairMicrobatch)
        return replace(moved, answers=self.answers.to(device))


def read_pairs(dataset: Dataset, indices: npt.NDArray[np.int64]) -> PairMicrobatch:
    """Read the pairs with these indices, int64 [num_pairs], at least one, and return a microbatch of them."""
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
    """Return a microbatch of one pair as two rows with a copy of the prompt each, padded at the end.

    It is for causal models that cannot attend to a prompt that answers share. `inputs` then contains only `input_ids`,
    int64 `[2, length]`, and `use_cache`; `logit_positions` are indices in the flattened rows. Log-probabilities need no
    mask for the padding, since no token depends on later ones.
    """
    tokens, bounds = microbatch.inputs["input_ids"][0], microbatch.inputs["cu_seq_lens_q"].tolist()
    assert len(bounds) == 3, f"expected one pair, got {len(bounds) // 2}"
    split = bounds[1]
    num_prompt = int(microbatch.inputs["position_ids"][0, split])
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

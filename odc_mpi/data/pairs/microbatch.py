"""Microbatches of pairs, in which the two answers share the tokens of their prompt."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.microbatch import Microbatch


@dataclass(frozen=True, kw_only=True)
class PairMicrobatch(Microbatch):
    """A microbatch of pairs. `inputs` contains no labels.

    The tokens of each pair are its prompt, the chosen and the rejected answer. They form two sequences: prompt and
    chosen answer, then the rejected answer. The latter has more keys than queries (`cu_seq_lens_k`): its tokens also
    attend to the prompt, which is the beginning of the sequence before, and their positions continue those of the
    prompt. `logit_positions` are not ascending, since the last token of a prompt predicts the first of both answers.

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


class _Answer(NamedTuple):
    """An answer of a pair in a microbatch. The chosen one includes the prompt, which the rejected one shares.

    Attributes:
        length: Number of tokens.
        num_keys: Number of tokens including the prompt.
        positions: Position of each token in its sequence, int64 `[length]`.
        logit_positions: Indices in the microbatch of the tokens that predict the loss tokens, int64 `[loss tokens]`.
        targets: Loss tokens, int64 `[loss tokens]`.
    """

    length: int
    num_keys: int
    positions: npt.NDArray[np.int64]
    logit_positions: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]


def read_pairs(dataset: Dataset, indices: npt.NDArray[np.int64]) -> PairMicrobatch:
    """Read the pairs with these indices, int64 [num_pairs], at least one, and return a microbatch of them."""
    assert dataset.pair_counts is not None
    answers: list[_Answer] = []
    rows, begin = [], 0
    for index in indices:
        tokens, loss_mask = dataset[index]
        num_prompt, num_chosen, _ = dataset.pair_counts[index].tolist()
        answers += _split(tokens, loss_mask, num_prompt, num_chosen, begin)
        rows.append(tokens)
        begin += len(tokens)
    bounds = {
        "cu_seq_lens_q": np.cumsum([0, *(answer.length for answer in answers)]),
        "cu_seq_lens_k": np.cumsum([0, *(answer.num_keys for answer in answers)]),
    }
    targets = np.concatenate([answer.targets for answer in answers])
    return PairMicrobatch(
        {
            "input_ids": torch.from_numpy(np.concatenate(rows))[None],
            "position_ids": torch.from_numpy(np.concatenate([answer.positions for answer in answers]))[None],
            **{name: torch.from_numpy(values).to(torch.int32) for name, values in bounds.items()},
            "max_length_q": max(answer.length for answer in answers),
            "max_length_k": max(answer.num_keys for answer in answers),
            "use_cache": False,
        },
        len(targets),
        begin,
        indices,
        torch.from_numpy(np.concatenate([answer.logit_positions for answer in answers])),
        torch.from_numpy(targets),
        answers=torch.from_numpy(np.repeat(np.arange(len(answers)), [len(answer.targets) for answer in answers])),
    )


def _split(
    tokens: npt.NDArray[np.int64], loss_mask: npt.NDArray[np.bool_], num_prompt: int, num_chosen: int, begin: int
) -> Iterator[_Answer]:
    """Yield the two answers of a pair whose first token has the index `begin` in the microbatch."""
    end_of_chosen = num_prompt + num_chosen
    for first, start, stop in ((0, num_prompt, end_of_chosen), (end_of_chosen, end_of_chosen, len(tokens))):
        loss = start + np.flatnonzero(loss_mask[start:stop])
        # The first token of an answer is predicted by the last one of the prompt.
        predicted_by = np.where(loss == start, num_prompt - 1, loss - 1)
        num_keys = num_prompt + stop - start
        positions = np.arange(num_keys - (stop - first), num_keys)
        yield _Answer(stop - first, num_keys, positions, begin + predicted_by, tokens[loss])


def as_padded_rows(microbatch: PairMicrobatch) -> PairMicrobatch:
    """Return a microbatch of one pair as two rows with a copy of the prompt each, padded at the end.

    It is for causal models that cannot attend to a prompt that answers share. They need no mask for the padding, since
    no token depends on later ones. `logit_positions` are indices in the flattened rows.
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

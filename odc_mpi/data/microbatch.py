"""Microbatches: the data of one forward and backward pass, as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from odc_mpi.data.dataset.reader import Dataset

IGNORED_LABEL = -100  # the default `ignore_index` of `torch.nn.functional.cross_entropy`


@dataclass(frozen=True)
class Microbatch:
    """Data for one forward and backward pass: concatenated sequences without padding, or a chunk of one sequence.

    Attributes:
        inputs: Arguments for a Hugging Face causal model. `input_ids` and `position_ids` (positions in the sequence)
            are int64 [1, T]. So are `labels`, which chunks and prompt groups do not have. Labels are -100 for tokens
            without loss and for the first token of each sequence. `cu_seq_lens_q` and `cu_seq_lens_k`, int32
            [num_sequences + 1], are the bounds of the sequences and of their keys (see `packed_inputs`). `max_length_q`
            and `max_length_k` are ints. `use_cache` is False (see `flash_attention_kwargs`).
        num_tokens: Number K of loss tokens.
        num_input_tokens: Number T of tokens.
        indices: Data set indices of the sequences, pairs or prompts, int64 [n].
        logit_positions: Indices, from 0 to T - 1, of the tokens whose logits predict the loss tokens, int64 [K].
        targets: Loss tokens, int64 [K].
        is_chunk: True if the microbatch is a chunk of a sequence whose other chunks are on other ranks.
    """

    inputs: dict[str, Any]
    num_tokens: int
    num_input_tokens: int
    indices: npt.NDArray[np.int64]
    logit_positions: torch.Tensor
    targets: torch.Tensor
    is_chunk: bool = False

    def to(self, device: torch.device) -> "Microbatch":
        """Copy the tensors to `device`, asynchronously if it is a GPU. The bounds `cu_seq_lens_*` stay on the host."""
        if device.type == "cpu":
            return self

        def move(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: each if name.startswith("cu_seq_lens") else move(each) for name, each in value.items()}
            # From pageable memory, a copy would wait until the GPU has run all earlier kernels.
            return value.pin_memory().to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value

        return replace(self, **{field.name: move(getattr(self, field.name)) for field in fields(self)})


def read_microbatch(dataset: Dataset, indices: npt.NDArray[np.int64]) -> Microbatch:
    """Read the sequences at `indices`, a nonempty int64 [n] array, as a microbatch."""
    tokens, loss_masks = zip(*(dataset[i] for i in indices), strict=True)
    for loss_mask in loss_masks:
        loss_mask[0] = False
    all_tokens = np.concatenate(tokens)
    labels = np.where(np.concatenate(loss_masks), all_tokens, IGNORED_LABEL)
    inputs = packed_inputs(all_tokens, list(map(len, tokens)))
    inputs["labels"] = torch.from_numpy(labels)[None]
    return _with_targets(inputs, np.append(labels[1:], IGNORED_LABEL), indices)


def read_chunk(dataset: Dataset, index: int, begin: int, end: int) -> Microbatch:
    """Read tokens `begin:end` of a sequence as a chunk. The chunk's last token predicts the token at index `end`."""
    tokens, loss_mask = dataset[index]
    labels = np.append(np.where(loss_mask, tokens, IGNORED_LABEL), IGNORED_LABEL)
    inputs = packed_inputs(tokens[begin:end], [end - begin])
    inputs["position_ids"] = torch.arange(begin, end)[None]
    return replace(_with_targets(inputs, labels[begin + 1 : end + 1], np.array([index])), is_chunk=True)


def _with_targets(
    inputs: dict[str, Any], next_labels: npt.NDArray[np.int64], indices: npt.NDArray[np.int64]
) -> Microbatch:
    """Create a microbatch from its inputs and the labels of the tokens that follow, int64 [T]."""
    positions = np.flatnonzero(next_labels != IGNORED_LABEL)
    targets = next_labels[positions]
    return Microbatch(
        inputs, len(targets), len(next_labels), indices, torch.from_numpy(positions), torch.from_numpy(targets)
    )


def packed_inputs(
    tokens: npt.NDArray[np.int64], lengths: Sequence[int], shared_prompts: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the model arguments for concatenated sequences, without labels (see `Microbatch.inputs`).

    `lengths` contains the number of tokens in each sequence, not counting a shared prompt. `shared_prompts` contains,
    for each sequence, the number n of prompt tokens that it shares with the nearest earlier sequence whose entry is 0.
    The sequence attends to these tokens. Its positions begin at n, and it has n more keys than tokens.
    """
    prompts = shared_prompts or [0] * len(lengths)
    positions = [torch.arange(prompt, prompt + length) for prompt, length in zip(prompts, lengths, strict=True)]
    num_keys = [prompt + length for prompt, length in zip(prompts, lengths, strict=True)]
    return {
        "input_ids": torch.from_numpy(tokens)[None],
        "position_ids": torch.cat(positions)[None],
        **flash_attention_kwargs(lengths, num_keys),
    }


def flash_attention_kwargs(lengths: Sequence[int], num_keys: Sequence[int] | None = None) -> dict[str, Any]:
    """Return the bounds of concatenated sequences as `FlashAttentionKwargs` for transformers, and `use_cache=False`.

    `num_keys` contains the number of keys for each sequence; None if each has as many keys as tokens.
    """
    # With a cache, which is the default, transformers silently does not separate sequences by their positions.
    kwargs: dict[str, Any] = {"use_cache": False}
    for name, counts in (("q", lengths), ("k", num_keys or lengths)):
        kwargs[f"cu_seq_lens_{name}"] = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        kwargs[f"max_length_{name}"] = max(counts)
    return kwargs

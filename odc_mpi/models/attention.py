"""Attention within packed sequences. The cost grows with the square of each length, not with the square of their sum.

A microbatch is one row of concatenated sequences without padding. Hugging Face models pass the boundaries of sequences
(`cu_seq_lens_q`) to the attention function, and `packed_attention` attends within each sequence separately.

Some models pass the sliding window to the layer, others only apply it to the attention mask. Therefore
`_window_as_mask` replaces a mask with a window by a tensor that holds only the size of the window.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

#: Names under which transformers knows this attention (`attn_implementation`), by the implementation for one sequence.
#: sdpa chooses a kernel for the device; eager computes the scores explicitly and supports soft caps.
IMPLEMENTATIONS = {"sdpa": "odc_packed", "eager": "odc_packed_eager"}
#: Layer types that carry no state across packed sequences.
PACKABLE_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
#: Limit on the tokens of sequences of equal length that are batched into one call. Above it, the overhead of a call is
#: less than its work, and the scores of eager attention would need too much memory.
_MAX_TOKENS = 4096
_PACKED_SUPPORT = "packed attention supports only plain causal layers without padding"
#: Attention arguments of some models that change the result and are not supported.
_UNSUPPORTED = ("s_aux", "position_bias")


class PackingUnsupportedError(ValueError):
    """Raised if a model needs attention that is not supported for packed sequences."""


class ContextParallelUnsupportedError(ValueError):
    """Raised if a model needs an operation that is not supported for a chunk of a sequence."""


class SequenceChunk(Protocol):
    """Chunk of a split sequence, which is a microbatch of its own. Implements the attention across chunks.

    Attributes:
        num_tokens: Number of tokens of the full sequence.
    """

    num_tokens: int

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, layer: int
    ) -> torch.Tensor:
        """Compute causal attention of this chunk to itself and earlier chunks. One-sided; waits for earlier chunks."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    softcap: float | None = None,
    eager: bool = False,
    chunk: SequenceChunk | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each packed sequence. Has the signature of attention functions of transformers.

    Args:
        module: Attention layer.
        query: Queries, `[batch, heads, tokens, head_dim]`.
        key: Keys, `[batch, key_value_heads, tokens, head_dim]`.
        value: Values, shaped like `key`.
        attention_mask: None, or the size of the sliding window as a tensor. Inputs have no padding.
        scaling: Factor on the scores. None means `head_dim ** -0.5`.
        sliding_window: Number of latest tokens that a token attends to, including itself. None means all.
        cu_seq_lens_q: Sequence boundaries in a batch of one row, int32 `[sequences + 1]` in host memory.
        softcap: Limit on the scores, applied by a tanh. Requires `eager`.
        eager: True to compute the scores explicitly instead of calling a PyTorch kernel.
        chunk: Chunk of a split sequence to which the tokens belong. They also attend to earlier chunks. None: no chunk.

    Returns:
        Output, `[batch, tokens, heads, head_dim]`, and None in place of attention weights.

    Raises:
        PackingUnsupportedError: The layer needs more than causal attention, or the model passes no sequence boundaries.
        ContextParallelUnsupportedError: The layer needs attention that is not supported for a chunk.
    """
    unsupported = {name: kwargs.get(name) is not None for name in _UNSUPPORTED} | {
        "a layer that is not causal": not kwargs.get("is_causal", getattr(module, "is_causal", True)),
        "an attention mask": attention_mask is not None and attention_mask.ndim > 0,
        "softcap, which requires attn_implementation eager": softcap is not None and not eager,
        "no sequence boundaries (cu_seq_lens_q)": cu_seq_lens_q is None,
    }
    _refuse(PackingUnsupportedError, _PACKED_SUPPORT, unsupported)
    assert cu_seq_lens_q is not None, "refused"
    if attention_mask is not None:
        sliding_window = min(int(attention_mask), sliding_window or int(attention_mask))
    if chunk is not None:
        unsupported = {
            "attn_implementation eager": eager,
            "dropout of attention weights": dropout > 0,
            f"a window of {sliding_window} tokens": sliding_window is not None and sliding_window < chunk.num_tokens,
            "values and keys of different sizes": key.shape != value.shape,
        }
        _refuse(ContextParallelUnsupportedError, "attention of a chunk supports only plain causal layers", unsupported)
        output = chunk.attend(query, key, value, scaling, _layer_index(module))
    else:
        lengths = [stop - start for start, stop in itertools.pairwise(cu_seq_lens_q.tolist())]
        kernel = partial(_eager, softcap) if eager else _causal
        attend = partial(kernel, dropout=dropout, scaling=scaling, window=sliding_window)
        output = _attend_per_sequence(attend, lengths, query, key, value)
    return output.transpose(1, 2).contiguous(), None


def _attend_per_sequence(
    attend: Callable[..., torch.Tensor], lengths: list[int], *states: torch.Tensor
) -> torch.Tensor:
    """Attend within each sequence; states are `[1, heads, tokens, head_dim]`."""
    split = [state.split(lengths, 2) for state in states]
    outputs = list(split[0])
    for positions in _group_by_length(lengths):
        rows = attend(*(_rows([sequences[i] for i in positions]) for sequences in split))
        for i, output in zip(positions, rows.split(1), strict=True):
            outputs[i] = output
    return torch.cat(outputs, 2)


def _rows(sequences: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(sequences) if len(sequences) > 1 else sequences[0]


def _group_by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield positions of sequences of equal length, which one call computes.

    A call costs more than a short sequence, and training on completions has many short sequences in a microbatch.
    """
    positions_by_length: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        positions_by_length.setdefault(length, []).append(i)
    for length, positions in positions_by_length.items():
        max_sequences = max(1, _MAX_TOKENS // length)
        for begin in range(0, len(positions), max_sequences):
            yield positions[begin : begin + max_sequences]


def _refuse(kind: type[ValueError], supported: str, refused: Mapping[str, bool]) -> None:
    if unsupported := [feature for feature, is_used in refused.items() if is_used]:
        raise kind(f"{supported}, got {', '.join(unsupported)}")


def _layer_index(module: torch.nn.Module) -> int:
    layer: int | None = getattr(module, "layer_idx", None)
    if layer is None:
        raise ContextParallelUnsupportedError(
            f"attention of a chunk needs the layer index: {type(module).__name__} has no layer_idx"
        )
    return layer


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, scaling: float | None, window: int | None
) -> torch.Tensor:
    num_tokens = q.shape[2]
    mask = None if window is None or num_tokens <= window else _causal_mask(num_tokens, window, q.device)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, mask is None, scale=scaling, enable_gqa=grouped)


def _eager(
    softcap: float | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_causal_mask(q.shape[2], window, q.device), -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)  # in fp32, as transformers does
    return F.dropout(weights, dropout) @ v


def _causal_mask(num_tokens: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return a mask, bool `[num_tokens, num_tokens]`: True where the token of the row attends to that of the column."""
    tokens = torch.arange(num_tokens, device=device)
    distance = tokens[:, None] - tokens[None, :]
    return (distance >= 0) & (distance < (num_tokens if window is None else window))


def register() -> None:
    """Register the attention functions of this module with transformers. Idempotent."""
    for name, attend in (("sdpa", packed_attention), ("eager", partial(packed_attention, eager=True))):
        if IMPLEMENTATIONS[name] not in AttentionInterface():  # `compile_layers` may have replaced the function
            AttentionInterface.register(IMPLEMENTATIONS[name], attend)
            AttentionMaskInterface.register(IMPLEMENTATIONS[name], _window_as_mask)


def _window_as_mask(*args: Any, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any) -> Any:
    """Return the sliding window of a mask, int64 `[]` in host memory, or None for a mask without a window.

    `packed_attention` is causal without a mask; a full mask would cost the square of the number of packed tokens. With
    `use_vmap` the model adds its own rule to the mask.
    """
    if use_vmap:
        raise PackingUnsupportedError(f"{_PACKED_SUPPORT}, got a model-specific mask")
    return None if local_size is None else torch.tensor(local_size, device="cpu")

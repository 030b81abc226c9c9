"""Attention within packed sequences. The cost is quadratic in the length of each sequence, not in the packed length.

A microbatch is one row of concatenated sequences without padding. Transformers models pass the sequence boundaries
(`cu_seq_lens_q`) to the attention function `packed_attention`, which attends within each sequence separately.

Some models pass the size of a sliding window to the attention function, whereas others apply the window only to the
attention mask. `_local_pattern` replaces such a mask with a tensor that contains only the window size. In Llama 4, the
mask restricts each token to the attention chunk that contains it. Such a mask is replaced with the chunk size.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from odc_mpi.models.packed import per_sequence, varlen
from odc_mpi.models.quirks.temperatures import restart_temperatures

#: Names under which packed attention is registered with transformers, keyed by `attn_implementation`. "sdpa" calls
#: `scaled_dot_product_attention`; "eager" computes the scores explicitly. Soft caps always use eager attention.
IMPLEMENTATIONS = {"sdpa": "odc_packed", "eager": "odc_packed_eager"}
_PACKED_SUPPORT = "packed attention supports only plain causal layers without padding"


class PackingUnsupportedError(ValueError):
    """Raised if a model needs a kind of attention that is not supported for packed sequences."""


class ContextParallelUnsupportedError(ValueError):
    """Raised if a model needs an operation that is not supported for a chunk of a sequence."""


@dataclass(frozen=True)
class SequenceChunk:
    """Chunk of a sequence that is split across ranks.

    Attributes:
        num_tokens: Number of tokens in the unsplit sequence.
        attend: Function that computes this chunk's causal attention to itself and all earlier chunks. Its arguments
            are the chunk's queries, keys and values, `scaling` (see `packed_attention`), and the layer index. The
            result is shaped like the queries. One-sided; waits for the earlier chunks.
    """

    num_tokens: int
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float | None, int], torch.Tensor]


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
    cu_seq_lens_k: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    eager: bool = False,
    chunk: SequenceChunk | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each packed sequence. Has the signature of a transformers attention function.

    Args:
        query: Queries, `[1, heads, tokens, head_dim]`.
        key, value: Keys and values, `[1, key_value_heads, tokens, head_dim]`. The `head_dim` of values may differ.
        attention_mask: Window size and chunk size for local attention, int64 `[2]`. One of them is 0 (unlimited). None
            means global attention.
        dropout: Probability of dropping an attention weight.
        scaling: Factor by which the scores are multiplied. None means `head_dim ** -0.5`.
        sliding_window: Number of most recent tokens that a token attends to, including itself. None means all.
        cu_seq_lens_q: Sequence boundaries, int32 `[sequences + 1]` in host memory. Derived from `position_ids` if None.
        cu_seq_lens_k: Boundaries of each sequence's keys, shaped like `cu_seq_lens_q`. A sequence with n more keys
            than tokens shares a prompt: it also attends to the first n tokens of the nearest earlier sequence that has
            as many keys as tokens. None means that no prompts are shared. Ignored if `cu_seq_lens_q` is None.
        position_ids: Positions of the tokens in their sequences, `[1, tokens]`, for models that do not pass
            `cu_seq_lens_q` to all layers (StableLM, Nemotron); otherwise ignored. A sequence begins wherever a position
            is not the previous one plus 1. If it begins at position n > 0, it shares a prompt of n tokens.
        softcap: Limit on the absolute values of the scores, applied with tanh. None means no limit.
        s_aux: Attention sinks, `[heads]`: each head's score for an extra key whose value is zero. None means no sinks.
        eager: True to compute the scores explicitly instead of calling a PyTorch kernel.
        chunk: Chunk that the tokens form if their sequence is split. The tokens also attend to all earlier chunks.

    Returns:
        The output, `[1, tokens, heads, head_dim]` with the values' `head_dim`, and None instead of attention weights.

    Raises:
        PackingUnsupportedError: The layer needs more than causal attention, or the model passes no sequence boundaries.
        ContextParallelUnsupportedError: The layer needs attention that is not supported for a chunk.
    """
    if cu_seq_lens_q is None and position_ids is not None:
        cu_seq_lens_q, cu_seq_lens_k = _find_boundaries(position_ids)
    unsupported = {
        "position_bias": kwargs.get("position_bias") is not None,
        "a layer that is not causal": not kwargs.get("is_causal", getattr(module, "is_causal", True)),
        "an attention mask": attention_mask is not None and attention_mask.ndim != 1,
        "no sequence boundaries (cu_seq_lens_q)": cu_seq_lens_q is None,
    }
    _refuse(PackingUnsupportedError, _PACKED_SUPPORT, unsupported)
    assert cu_seq_lens_q is not None, "refused"
    window, chunk_size = (None, None) if attention_mask is None else (n or None for n in attention_mask.tolist())
    window = min(filter(None, (window, sliding_window)), default=None)
    eager = eager or softcap is not None
    if chunk is not None:
        unsupported = {
            "attn_implementation eager": eager,
            "dropout of attention weights": dropout > 0,
            f"a window of {window} tokens": window is not None and window < chunk.num_tokens,
            f"attention chunks of {chunk_size} tokens": chunk_size is not None and chunk_size < chunk.num_tokens,
            "attention sinks": s_aux is not None,
            "attention temperatures by position": getattr(module, "attn_temperature_tuning", False),
            "values and keys of different sizes": key.shape != value.shape,
            "no layer index (layer_idx)": getattr(module, "layer_idx", None) is None,
        }
        _refuse(ContextParallelUnsupportedError, "attention of a chunk supports only plain causal layers", unsupported)
        output = chunk.attend(query, key, value, scaling, cast(int, module.layer_idx))
        return output.transpose(1, 2).contiguous(), None
    lengths = cu_seq_lens_q.diff().tolist()
    num_keys = lengths if cu_seq_lens_k is None else cu_seq_lens_k.diff().tolist()
    prompts = [keys - length for keys, length in zip(num_keys, lengths, strict=True)]
    query = restart_temperatures(module, query, lengths, prompts)
    is_plain = not eager and dropout == 0 and chunk_size is None and s_aux is None
    if is_plain and varlen.is_faster(lengths) and varlen.is_supported(query, key, value):
        return varlen.attend(query, key, value, lengths, prompts, scaling, window), None
    kernel = partial(per_sequence.eager, softcap) if eager else per_sequence.causal
    attend: Callable[..., torch.Tensor] = partial(kernel, dropout=dropout, scaling=scaling, window=window)
    if s_aux is not None:
        attend = partial(per_sequence.with_sinks, attend, s_aux, scaling)
    output = per_sequence.attend(attend, query, key, value, lengths, prompts, chunk_size)
    return output.transpose(1, 2).contiguous(), None


def _find_boundaries(position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the arguments `cu_seq_lens_q` and `cu_seq_lens_k` of `packed_attention` from token positions."""
    # Positions on the meta device have no values. They occur only in a trial, which has one sequence.
    positions = list(range(position_ids.shape[1])) if position_ids.is_meta else position_ids[0].tolist()
    starts = [i for i, position in enumerate(positions) if not i or position != positions[i - 1] + 1]
    bounds = torch.tensor([*starts, len(positions)], dtype=torch.int32)
    shared_prompts = torch.tensor([0, *(positions[i] for i in starts)], dtype=torch.int32)
    return bounds, bounds + shared_prompts.cumsum(0)


def _refuse(kind: type[ValueError], supported: str, refused: Mapping[str, bool]) -> None:
    if unsupported := [feature for feature, is_used in refused.items() if is_used]:
        raise kind(f"{supported}, got {', '.join(unsupported)}")


def register() -> None:
    """Register the packed attention functions with transformers. Idempotent."""
    for name, attend in (("sdpa", packed_attention), ("eager", partial(packed_attention, eager=True))):
        if IMPLEMENTATIONS[name] not in AttentionInterface():  # `compile_layers` may have replaced the function
            AttentionInterface.register(IMPLEMENTATIONS[name], attend)
            AttentionMaskInterface.register(IMPLEMENTATIONS[name], _local_pattern)


@contextmanager
def recorded_calls() -> Iterator[list[tuple[torch.nn.Module, bool]]]:
    """Context manager that yields a list to which each call to packed attention in the `with` block is appended.

    Each call is recorded as a pair: the calling layer, and a bool that is True if the scores have a soft cap.
    """
    calls: list[tuple[torch.nn.Module, bool]] = []
    registered = {name: AttentionInterface()[name] for name in IMPLEMENTATIONS.values()}

    def record(attend: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append((module, kwargs.get("softcap") is not None))
        return attend(module, *args, **kwargs)

    try:
        for name, attend in registered.items():
            AttentionInterface.register(name, partial(record, attend))
        yield calls
    finally:
        for name, attend in registered.items():
            AttentionInterface.register(name, attend)


def _local_pattern(
    *args: Any, config: Any = None, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any
) -> Any:
    """Return the argument `attention_mask` of `packed_attention`, in host memory.

    A full mask would need memory quadratic in the number of packed tokens. Transformers passes the size of a window or
    of chunks as `local_size`. `use_vmap` is True if the model adds a rule of its own to the mask.
    """
    if use_vmap:
        raise PackingUnsupportedError(f"{_PACKED_SUPPORT}, got a model-specific mask")
    if local_size is None:
        return None
    is_window, is_chunk = (
        getattr(config, name, None) == local_size for name in ("sliding_window", "attention_chunk_size")
    )
    if is_window == is_chunk:
        raise PackingUnsupportedError(f"{_PACKED_SUPPORT}, got a local mask of unknown kind")
    return torch.tensor([local_size, 0] if is_window else [0, local_size], device="cpu")

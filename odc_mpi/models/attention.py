"""Attention over packed sequences, each by itself: the cost grows with the square of each length, not of the pack's.

A microbatch is one row of several sequences end to end. With padding-free inputs Hugging Face's models hand the
boundaries (`cu_seq_lens_q`) down to the attention function; `packed_attention` computes each sequence for itself.

Some models pass the sliding window to a layer, others only draw it into the layer's mask. So in place of a mask with a
window `_window_as_mask` makes a mask of a single number, the window.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

#: The names of this attention in transformers (`attn_implementation`), by the one that each sequence gets. sdpa is
#: torch's, which chooses a kernel for the device; eager computes the scores, and serves soft caps on them.
IMPLEMENTATIONS = {"sdpa": "odc_packed", "eager": "odc_packed_eager"}
#: Kinds of layers whose state does not run across sequences, so that packing is safe with this attention.
PACKABLE_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
#: The most tokens of several sequences that one call attends within. With more, a call costs less than its work, and
#: the scores of eager attention would take memory.
_MAX_TOKENS = 4096


class PackingUnsupportedError(ValueError):
    """A model asks for attention that packed sequences cannot be given."""


class ContextParallelUnsupportedError(ValueError):
    """A model asks for what a piece of a sequence cannot be given."""


class SequenceChunk(Protocol):
    """The piece of a sequence that a microbatch is.

    Attributes:
        num_tokens: Of the whole sequence.
    """

    num_tokens: int

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, layer: int
    ) -> torch.Tensor:
        """Attend causally to all tokens of the sequence up to the piece's own. One-sided, waits for other pieces."""


#: Arguments of other models' attention that would change the result and are not served here.
_UNSUPPORTED = ("s_aux", "position_bias")


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
    """Attend causally within each sequence; the signature is that of transformers' attention functions.

    Args:
        module: The layer.
        query: `[batch, heads, tokens, head_dim]`.
        key: `[batch, key_value_heads, tokens, head_dim]`.
        value: Like `key`.
        attention_mask: None, or from `_window_as_mask`: inputs have no padding.
        dropout: Probability to drop an attention weight.
        scaling: Factor of the scores; by default one over the root of `head_dim`.
        sliding_window: How many tokens back a token sees, itself included; None for all.
        cu_seq_lens_q: `[sequences + 1]` int32, on the host, boundaries in a batch of one row.
        softcap: Most that a score can be, by a tangent; only with `eager`.
        eager: Whether to compute the scores of each sequence; else torch's kernels do.
        chunk: Given if the tokens are one piece of a sequence: attends to the earlier pieces, too.
        **kwargs: Other arguments that transformers passes on.

    Returns:
        `[batch, tokens, heads, head_dim]` and no attention weights.

    Raises:
        UnpackableError: The layer asks for more than causal attention, or the model does not pass the boundaries.
    """
    unsupported = {name: kwargs.get(name) is not None for name in _UNSUPPORTED} | {
        "a layer that is not causal": not kwargs.get("is_causal", getattr(module, "is_causal", True)),
        "an attention mask": attention_mask is not None and attention_mask.ndim > 0,
        "softcap, which takes attn_implementation eager": softcap is not None and not eager,
        "no boundaries of sequences (cu_seq_lens_q)": cu_seq_lens_q is None,
    }
    _refuse(PackingUnsupportedError, "packed attention serves plain causal layers without padding", unsupported)
    assert cu_seq_lens_q is not None, "refused"
    if attention_mask is not None:
        sliding_window = min(int(attention_mask), sliding_window or int(attention_mask))
    if chunk is not None:
        unsupported = {
            "attn_implementation eager": eager,
            "dropout of attention weights": dropout > 0,
            f"a window of {sliding_window} tokens": sliding_window is not None and sliding_window < chunk.num_tokens,
            "values of another size than keys": key.shape != value.shape,
        }
        _refuse(ContextParallelUnsupportedError, "attention of a piece serves plain causal layers", unsupported)
        return chunk.attend(query, key, value, scaling, _layer_index(module)).transpose(1, 2).contiguous(), None
    lengths = [stop - start for start, stop in itertools.pairwise(cu_seq_lens_q.tolist())]
    attend = partial(_eager, softcap) if eager else _causal
    one = partial(attend, dropout=dropout, scaling=scaling, window=sliding_window)
    return _attend_per_sequence(one, lengths, query, key, value).transpose(1, 2).contiguous(), None


def _attend_per_sequence(
    attend: Callable[..., torch.Tensor], lengths: list[int], *states: torch.Tensor
) -> torch.Tensor:
    """Attend within each sequence, those of one length in one call; states are `[1, heads, tokens, head_dim]`."""
    split = [state.split(lengths, 2) for state in states]
    parts = list(split[0])
    for same in _group_by_length(lengths):
        found = attend(*(_rows([sequences[i] for i in same]) for sequences in split))
        for i, part in zip(same, found.split(1), strict=True):
            parts[i] = part
    return torch.cat(parts, 2)


def _rows(sequences: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(sequences) if len(sequences) > 1 else sequences[0]


def _group_by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield positions of sequences of the same length, to attend in one call: a call costs more than a short sequence.

    Many short sequences in a microbatch are the rule where completions are trained.
    """
    positions_by_length: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        positions_by_length.setdefault(length, []).append(i)
    for length, positions in positions_by_length.items():
        max_sequences = max(1, _MAX_TOKENS // length)
        for begin in range(0, len(positions), max_sequences):
            yield positions[begin : begin + max_sequences]


def _refuse(kind: type[ValueError], supported: str, refused: Mapping[str, bool]) -> None:
    unsupported = [what for what, is_given in refused.items() if is_given]
    if unsupported:
        raise kind(f"{supported}, got {', '.join(unsupported)}")


def _layer_index(module: torch.nn.Module) -> int:
    layer: int | None = getattr(module, "layer_idx", None)
    if layer is None:
        raise ContextParallelUnsupportedError(
            f"attention of a piece needs the number of the layer, {type(module).__name__} has none"
        )
    return layer


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, scaling: float | None, window: int | None
) -> torch.Tensor:
    num_tokens = q.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if window is None or num_tokens <= window:
        return F.scaled_dot_product_attention(q, k, v, None, dropout, True, scale=scaling, enable_gqa=grouped)
    mask = _visible(num_tokens, window, q.device)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scaling, enable_gqa=grouped)


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
    scores = scores.masked_fill(~_visible(q.shape[2], window, q.device), -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)  # in fp32, as transformers does
    return F.dropout(weights, dropout) @ v


def _visible(num_tokens: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return the mask of a sequence, bool [num_tokens, num_tokens]: True where a row sees a column."""
    tokens = torch.arange(num_tokens, device=device)
    distance = tokens[:, None] - tokens[None, :]
    return (distance >= 0) & (distance < (num_tokens if window is None else window))


def register() -> None:
    """Make the functions known to transformers. Local; a second call does nothing."""
    for name, attend in (("sdpa", packed_attention), ("eager", partial(packed_attention, eager=True))):
        if IMPLEMENTATIONS[name] not in AttentionInterface():  # it may have become one that Dynamo leaves out
            AttentionInterface.register(IMPLEMENTATIONS[name], attend)
            AttentionMaskInterface.register(IMPLEMENTATIONS[name], _window_as_mask)


def _window_as_mask(*args: Any, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any) -> Any:
    """Return the window that transformers would draw into a mask, `[]` int64 on the host, or None if it has none.

    Causality is in the function itself; a whole mask would cost the square of the pack. With `use_vmap` the model adds
    a rule of its own to the mask.
    """
    if use_vmap:
        raise PackingUnsupportedError(
            "packed attention serves plain causal layers without padding, got a mask of its own"
        )
    return None if local_size is None else torch.tensor(local_size, device="cpu")

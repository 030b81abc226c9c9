"""Attention within packed sequences, with all features: windows, chunks, sinks, dropout and soft caps.

Sequences of equal length share kernel calls.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from operator import add

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

#: Lengths for which cuDNN may plan are multiples of this number of tokens.
PLANNED_MULTIPLE = 512
_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
#: Maximum number of tokens when sequences of equal length are batched into one call. With more tokens, the work of a
#: call outweighs its overhead, and eager attention would need too much memory for the scores.
_MAX_TOKENS = 4096


def with_prompts(states: torch.Tensor, lengths: list[int], prompts: list[int]) -> torch.Tensor:
    """Insert a copy of the shared prompt, with `prompts[i]` tokens, before each sequence i. 0 means no shared prompt.

    `states` are queries, keys or values, `[1, heads, tokens, head_dim]`. Sequence i has `lengths[i]` tokens. A shared
    prompt is the beginning of the nearest earlier sequence that has no shared prompt.
    """
    if not any(prompts):
        return states
    parts, owner = [], states
    for sequence, prompt in zip(states.split(lengths, 2), prompts, strict=True):
        owner = owner if prompt else sequence
        parts += [owner[:, :, :prompt], sequence]
    return torch.cat(parts, 2)


def with_sinks(
    kernel: Callable[..., torch.Tensor],
    sinks: torch.Tensor,
    scaling: float | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    """Compute attention with one sink per head: an extra first key that is visible to all tokens and has the value 0.

    `sinks`, `[heads]`, contains the scores of these keys. `kernel` computes attention without a soft cap, and takes the
    keyword arguments `scaling` and `sink` of `causal`. For the other arguments and the result, see `causal`.
    """
    scaling = q.shape[3] ** -0.5 if scaling is None else scaling
    scores = (sinks / scaling).to(q.dtype)[None, :, None, None].expand(*q.shape[:3], 1)
    q = F.pad(torch.cat([q, scores], 3), (0, 0, 1, 0))
    sink_key = F.pad(torch.ones_like(k[:, :, :1, :1]), (k.shape[3], 0))
    k, v = torch.cat([sink_key, F.pad(k, (0, 1))], 2), F.pad(v, (0, 1, 1, 0))
    return kernel(q, k, v, scaling=scaling, sink=True)[:, :, 1:, :-1]


def attend(
    kernel: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    prompts: list[int],
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Compute attention within each sequence and to its shared prompt. Returns `[1, heads, tokens, value_dim]`.

    Args:
        kernel: Function, such as a partial of `causal`, that computes causal attention from queries, keys and values,
            each `[sequences, heads, tokens, dim]`.
        query, key, value: Packed states, `[1, heads, tokens, dim]`. Keys and values may have fewer heads than queries.
        lengths: Number of tokens in each sequence, excluding its shared prompt.
        prompts: Number of tokens in the prompt that each sequence shares with an earlier one, or 0.
        chunk_size: Number of tokens in an attention chunk. The first chunk of a sequence begins with its shared prompt,
            if it has one. None means no chunks.
    """
    # If several sequences share a prompt, its queries are not repeated, which is up to 3 times as fast. Those of a pair
    # are, which rounds like two separate sequences.
    repeats_queries = chunk_size is not None or not any(map(min, pairwise(prompts)))
    repeated = prompts if repeats_queries else [0] * len(prompts)
    query = with_prompts(query, lengths, repeated)
    key, value = (with_prompts(states, lengths, prompts) for states in (key, value))
    num_queries = list(map(add, repeated, lengths))
    parts = list(zip(num_queries, map(add, prompts, lengths), strict=True))
    if chunk_size is not None:
        parts = [(min(chunk_size, n - begin),) * 2 for n in num_queries for begin in range(0, n, chunk_size)]
    # cuDNN takes 0.1 s to plan for each new length.
    without_plans = query.is_cuda and any(n % PLANNED_MULTIPLE for part in parts for n in part)
    with sdpa_kernel(_WITHOUT_PLANS) if without_plans else nullcontext():
        output = _attend_parts(kernel, parts, query, key, value)
    if any(repeated):
        sequences = zip(output.split(num_queries, 2), repeated, strict=True)
        output = torch.cat([sequence[:, :, prompt:] for sequence, prompt in sequences], 2)
    return output


def _attend_parts(
    kernel: Callable[..., torch.Tensor],
    parts: list[tuple[int, int]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Apply `kernel` to consecutive parts, given by their numbers of queries and of keys."""
    num_queries, num_keys = map(list, zip(*parts, strict=True))
    split = query.split(num_queries, 2), key.split(num_keys, 2), value.split(num_keys, 2)
    outputs = list(split[0])
    for positions in _group_by_size(parts):
        rows = kernel(*(_rows([sequences[i] for i in positions]) for sequences in split))
        for i, output in zip(positions, rows.split(1), strict=True):
            outputs[i] = output
    return torch.cat(outputs, 2)


def _rows(sequences: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(sequences) if len(sequences) > 1 else sequences[0]


def _group_by_size(parts: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Group parts of equal size, and yield the indices of the parts to batch into each call."""
    positions_by_size: dict[tuple[int, int], list[int]] = {}
    for i, size in enumerate(parts):
        positions_by_size.setdefault(size, []).append(i)
    for (_, num_keys), positions in positions_by_size.items():
        max_sequences = max(1, _MAX_TOKENS // num_keys)
        for begin in range(0, len(positions), max_sequences):
            yield positions[begin : begin + max_sequences]


def causal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout: float,
    scaling: float | None,
    window: int | None,
    sink: bool = False,
) -> torch.Tensor:
    """Compute causal attention with a PyTorch kernel. Returns `[sequences, heads, queries, value_dim]`.

    Queries, keys and values are `[sequences, heads, tokens, dim]`. The queries are those of the last tokens. Keys and
    values may have fewer heads. `scaling` is a factor for the scores; None means `head_dim ** -0.5`. `window` is the
    number of most recent keys visible to a token, including its own; None means all. If `sink` is True, the first key
    is a sink, which is visible to all tokens.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    is_plain = num_queries == num_keys and (window is None or num_keys - sink <= window)
    mask = None if is_plain else _causal_mask(num_queries, num_keys, window, q.device, sink)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, mask is None, scale=scaling, enable_gqa=grouped)


def eager(
    softcap: float | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout: float,
    scaling: float | None,
    window: int | None,
    sink: bool = False,
) -> torch.Tensor:
    """Compute attention like `causal`, but from explicit scores, which are soft-capped unless `softcap` is None."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_causal_mask(q.shape[2], k.shape[2], window, q.device, sink), -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)  # in fp32, as transformers does
    return F.dropout(weights, dropout) @ v


def _causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device, sink: bool) -> torch.Tensor:
    """Return a bool mask `[num_queries, num_keys]` whose element `[i, j]` is True if query i attends to key j."""
    tokens = torch.arange(num_keys, device=device)
    distance = tokens[num_keys - num_queries :, None] - tokens[None, :]
    mask = (distance >= 0) & (distance < (num_keys if window is None else window))
    if sink:
        mask[:, 0] = True
    return mask

"""Attention within packed sequences in one kernel call: PyTorch's FlashAttention, for 16-bit types on GPUs.

`torch.nn.attention.varlen` is not used, because its arguments differ between releases of PyTorch.
"""

from functools import lru_cache
from itertools import accumulate

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from odc_mpi.models.packed.per_sequence import PLANNED_MULTIPLE, with_prompts

_forward = torch.ops.aten._flash_attention_forward.default


def is_faster(lengths: list[int]) -> bool:
    """Return True if one call for all sequences is expected to be faster than `per_sequence.attend`.

    For a single long sequence, cuDNN is faster, but it spends 0.1 s on planning for each new length (H100; see
    benchmarks/notes/gpu.md). Therefore, cuDNN is used only for lengths that are multiples of `PLANNED_MULTIPLE`.
    """
    return len(lengths) > 1 or lengths[0] % PLANNED_MULTIPLE > 0


def is_supported(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return True if the kernel supports the device, dtype and head size of states `[1, heads, tokens, head_dim]`."""
    if not query.is_cuda or query.shape[3] % 8:
        return False
    grouped = query.shape[1] != key.shape[1]
    return can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, grouped))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    prompts: list[int],
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend within each sequence and to its shared prompt. For the arguments, see `per_sequence.attend` and `causal`.

    Returns the output, `[1, tokens, heads, head_dim]`.
    """
    bounds = key_bounds = _bounds(tuple(lengths), query.device)
    max_keys = max(lengths)
    if any(prompts):
        # The tokens of a sequence are its last keys, as the kernel's causal mask expects.
        key, value = (with_prompts(states, lengths, prompts) for states in (key, value))
        num_keys = tuple(prompt + length for prompt, length in zip(prompts, lengths, strict=True))
        key_bounds, max_keys = _bounds(num_keys, query.device), max(num_keys)
    output, *_ = _forward(
        *(states[0].transpose(0, 1) for states in (query, key, value)),
        bounds,
        key_bounds,
        max(lengths),
        max_keys,
        0.0,
        True,
        False,
        scale=scaling,
        window_size_left=None if window is None else window - 1,
        window_size_right=0,
    )
    return output[None]


@lru_cache(maxsize=4)
def _bounds(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return sequence boundaries, int32 `[sequences + 1]` on `device`. All layers of a microbatch use the same copy."""
    with torch.inference_mode(False):  # autograd could not save an inference tensor
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)

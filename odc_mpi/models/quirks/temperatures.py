"""Attention temperatures that grow with the position, in Llama 4."""

from typing import Any

import torch


def restart_temperatures(module: Any, query: torch.Tensor, lengths: list[int], prompts: list[int]) -> torch.Tensor:
    """Rescale the queries of Llama 4 layers without rotary embeddings according to token positions in the sequences.

    The model scales by positions in the packed row. All factors are 1 if the row has fewer than `floor_scale` tokens.
    """
    num_tokens = query.shape[2]
    if len(lengths) == 1 or not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query
    if num_tokens < module.floor_scale:
        return query
    in_row = torch.arange(num_tokens, device=query.device)
    in_sequence = torch.cat([in_row[n : n + length] for n, length in zip(prompts, lengths, strict=True)])
    applied, correct = (
        torch.log1p(torch.floor((positions + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        for positions in (in_row, in_sequence)
    )
    return (query * (correct / applied)[:, None]).to(query.dtype)

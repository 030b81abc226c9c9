"""Reasons for rejecting values of `attn_implementation`.

This module imports nothing, so that an invalid setting is reported before torch is imported.
"""

_UNSUPPORTED = {
    "flash_attention": "a library for GPUs that odc_mpi does not call: sdpa uses the FlashAttention kernels of PyTorch "
    "for each packed sequence where possible",
    "flex_attention": "torch has no backward of it on a CPU, and odc_mpi does not call it on a GPU: use sdpa",
    "paged|": "it is for generation with a paged cache, not for packed sequences: use sdpa",
    "kernels-community/": "odc_mpi loads no kernels from the Hub: use sdpa",
}


def unsupported_reason(name: object) -> str:
    """Return the reason for rejecting an attention implementation, in parentheses, or "" if no reason is known."""
    reasons = (reason for known, reason in _UNSUPPORTED.items() if isinstance(name, str) and name.startswith(known))
    return next((f" ({reason})" for reason in reasons), "")

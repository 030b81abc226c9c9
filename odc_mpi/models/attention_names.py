"""The names of attention in transformers (`attn_implementation`): those that are served, and why others are refused.

Nothing is imported here, so that a mistake shows at once.
"""

#: What `attention` implements.
SUPPORTED = ("sdpa", "eager")

_UNSUPPORTED = {
    "flash_attention": "a library for GPUs that odc_mpi does not call: with sdpa torch takes its own FlashAttention "
    "kernels where they serve, for each packed sequence",
    "flex_attention": "torch has no backward of it on a CPU, and odc_mpi does not call it on a GPU: take sdpa, or "
    "eager for soft caps",
    "paged|": "it is for generation with a paged cache, not for packed sequences: take sdpa",
    "kernels-community/": "odc_mpi loads no kernels from the Hub: take sdpa",
}


def unsupported_reason(name: object) -> str:
    """Return the reason to refuse an attention of transformers, to end a message; "" for other words."""
    reasons = (reason for known, reason in _UNSUPPORTED.items() if isinstance(name, str) and name.startswith(known))
    return next((f" ({reason})" for reason in reasons), "")

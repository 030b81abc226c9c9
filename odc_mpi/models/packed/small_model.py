"""Small copies of models, in float64 on the CPU, with which to try what a model's class and configuration can do.

A copy has the model's own class, layers and head sizes. It has fewer heads, and is as much narrower, so that sizes that
depend on each other still match. It also has fewer experts and tokens.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

#: Settings that are divided by the same factor. It divides the model's width, which comes first, and numbers of heads.
_WIDTHS = (
    "hidden_size n_embd d_model intermediate_size ffn_dim n_inner block_ff_dim attention_hidden_size lru_width "
    "mamba_d_ssm word_embed_proj_dim moe_intermediate_size shared_expert_intermediate_size"
)
_HEADS = (
    "num_attention_heads n_head n_heads num_heads mamba_n_heads mamba_num_heads n_mamba_heads linear_num_value_heads"
)
_GROUPS = "num_key_value_heads n_groups mamba_n_groups mamba_ngroups linear_num_key_heads"
#: Maximum values of other settings.
_LIMITS = {
    64: "vocab_size vocab_size_per_layer_input",
    4: "num_experts num_local_experts n_routed_experts moe_num_experts",
    2: "num_experts_per_tok moe_topk moe_k moe_top_k",
    1: "n_group topk_group",
}
#: Smallest width that is aimed at, and most parameters of a copy (400 MB); larger ones are not tried.
_MIN_WIDTH, _MAX_NUMEL = 16, 50_000_000


def small_config(config: Any) -> Any:
    """Return a copy of a text model's configuration with the same layers, but fewer heads, experts and tokens."""
    small = copy.deepcopy(config)

    def sizes(names: str) -> dict[str, int]:
        return {name: size for name in names.split() if type(size := getattr(small, name, None)) is int and size > 0}

    widths, heads = sizes(_WIDTHS), sizes(_HEADS)
    width = next(iter(widths.values()), 1)
    factor = math.gcd(*heads.values(), width, width // _MIN_WIDTH or 1)
    for name, size in (widths | heads | sizes(_GROUPS)).items():
        setattr(small, name, max(1, size // factor))
    for limit, names in _LIMITS.items():
        for name, size in sizes(names).items():
            setattr(small, name, min(size, limit))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(small, name, None) is not None:
            setattr(small, name, 0)
    return small


@contextmanager
def small_model(config: Any) -> Iterator[Any]:
    """Context manager that yields a small causal language model in evaluation mode, whose parameters all matter.

    The random numbers of torch are restored on exit. Raises `ValueError` if the copy would need too much memory, or
    whatever transformers raises for a configuration that it cannot use.
    """
    build = transformers.AutoModelForCausalLM.from_config
    small = small_config(config)
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in build(copy.deepcopy(small)).parameters())
    if numel > _MAX_NUMEL:
        raise ValueError(f"a small copy of it has {numel:,} parameters")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        # Grouped products of experts lack float64.
        module = build(small, dtype=torch.float64, experts_implementation="eager").eval()
        with torch.no_grad():
            for parameter in module.parameters():  # matrices are initialized so that layers change almost nothing
                parameter.copy_(5 * parameter if parameter.ndim > 1 else parameter + 0.1 * torch.randn_like(parameter))
        yield module


def random_tokens(module: Any, count: int) -> torch.Tensor:
    """Return random token ids for a small model, int64 `[1, count]`."""
    return torch.randint(len(module.get_input_embeddings().weight), (1, count))

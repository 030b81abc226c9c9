"""A small model as transformers has it, and the same weights as training has them."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from odc_mpi.models import attention

SETTINGS = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
    "attention_dropout": 0.3,
}


def plain_model(**changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **(SETTINGS | changes))).eval()


def packed_model(**changes):
    """The same weights as training has them: with the attention over packed sequences, without a cache, in training."""
    attention.register()
    config = AutoConfig.for_model("qwen2", **(SETTINGS | changes), use_cache=False)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.IMPLEMENTATIONS["sdpa"]).train()

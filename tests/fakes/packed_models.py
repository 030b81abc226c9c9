"""A small model as transformers has it, and the same weights as training has them."""

import torch
from tiny_qwen2 import SIZES
from transformers import AutoConfig, AutoModelForCausalLM

from odc_mpi.models import attention

SETTINGS = SIZES | {"vocab_size": 61, "max_position_embeddings": 40, "attention_dropout": 0.3}


def plain_model(auto_class=AutoModelForCausalLM, **changes):
    torch.manual_seed(0)
    return auto_class.from_config(AutoConfig.for_model("qwen2", **(SETTINGS | changes))).eval()


def packed_model(auto_class=AutoModelForCausalLM, **changes):
    """The same weights as training has them: with the attention over packed sequences, without a cache, in training."""
    attention.register()
    config = AutoConfig.for_model("qwen2", **(SETTINGS | changes), use_cache=False)
    torch.manual_seed(0)
    return auto_class.from_config(config, attn_implementation=attention.IMPLEMENTATIONS["sdpa"]).train()

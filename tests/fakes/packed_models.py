"""A small model as transformers has it, and the same weights as training has them; initial values of models."""

import torch
from tiny_qwen2 import SIZES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from odc_mpi.data.microbatch import packed_inputs
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


def first_values(meta_model):
    """Return the initial value of each parameter by name."""
    return {
        name: meta_model.weights.read(name, 0, parameter.numel()).view(parameter.shape).clone()
        for name, parameter in meta_model.module.named_parameters()
    }


def materialized(meta_model):
    """Return the module of a model, with its initial values in memory."""
    meta_model.module.load_state_dict(first_values(meta_model), strict=False, assign=True)
    return meta_model.module


def greedy_completion(model, tokens, max_new_tokens, stop=None):
    """Complete a prompt with `generate` of transformers."""
    prompt = torch.tensor([list(tokens)])
    settings = {"max_new_tokens": max_new_tokens, "eos_token_id": stop, "pad_token_id": 0, "do_sample": False}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0, prompt.shape[1] :].tolist()


class LargestTensor(TorchDispatchMode):
    """Records in `numel` the number of elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self.numel = max([self.numel, *(tensor.numel() for tensor in tensors)])
        return result


def assert_packed_like_single(packed, reference, tokens, lengths, rtol, atol):
    """The logits of packed sequences are those of `reference` for each sequence alone."""
    with torch.no_grad():
        logits = packed(**packed_inputs(tokens.numpy(), lengths)).logits[0]
        for sequence, found in zip(tokens.split(lengths), logits.split(lengths), strict=True):
            alone = reference(input_ids=sequence[None], use_cache=False).logits[0]
            torch.testing.assert_close(found, alone, rtol=rtol, atol=atol)

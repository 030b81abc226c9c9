"""The frozen prefix of a model: where it ends, whether later layers need nothing else, and what is stored."""

import numpy as np
import pytest
import torch
from packed_models import packed_model
from tiny_configurations import tiny_config
from transformers import AutoModelForCausalLM
from user_errors import refused

from odc_mpi.data.dataset.hidden_states import HiddenStates
from odc_mpi.data.groups import pack_groups
from odc_mpi.data.microbatch import packed_inputs
from odc_mpi.data.prompt_group import Answer, PromptGroup
from odc_mpi.models.frozen_prefix import FrozenPrefix, Prefix, decoder_layers, find_prefix


def with_frozen(module, first_trained):
    """Freeze all parameters but those of the layers from one on and of the head."""
    layers = decoder_layers(module)
    module.requires_grad_(False)
    for layer in layers[first_trained:]:
        layer.requires_grad_(True)
    return module


def tiny(family, **changes):
    config = tiny_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gpt2", "opt", "qwen3_moe", "granite", "glm4", "cohere2", "phi3"]
)
def test_prefix_of_families(family):
    module = with_frozen(tiny(family), 1)
    assert find_prefix(module) == Prefix(1, 2, 64)
    assert find_prefix(with_frozen(module, 2)).num_layers == 2  # only the head is trained


def test_refusals():
    frozen = "expected false...no layer is before the first trained parameter: set lora.layers_to_transform"
    refused(frozen, find_prefix, with_frozen(tiny("llama"), 0))
    module = with_frozen(tiny("llama"), 1)
    module.get_input_embeddings().requires_grad_(True)
    refused(frozen, find_prefix, module)
    noisy = with_frozen(tiny("llama", attention_dropout=0.1), 1)
    refused("expected false for LlamaForCausalLM...its first 1 layers have dropout or noise", find_prefix, noisy)
    shared = with_frozen(tiny("gemma3n_text"), 2)  # later layers use keys and values of earlier ones
    refused("expected false for Gemma3nForCausalLM, got true: ", find_prefix, shared)
    routed = with_frozen(tiny("qwen3_moe", output_router_logits=True), 1)
    refused("with output_router_logits, the loss needs all layers", find_prefix, routed)


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def cached(request, tmp_path):
    """A model of two layers, and its prefix of one."""
    module = packed_model(num_hidden_layers=2, attention_dropout=0.0).to(request.param).eval()
    store = HiddenStates(tmp_path, "a model", "0")
    yield module, FrozenPrefix(module, Prefix(1, 2, module.config.hidden_size), store, request.param)
    store.close()


def outputs(module, inputs):
    """The outputs, and whether the first layer computed."""
    calls = []
    hook = decoder_layers(module)[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        logits = module(**inputs).logits[0]
    hook.remove()
    return logits, bool(calls)


def make_visible(prefix):
    prefix.store.finish()
    prefix.store.refresh()


def test_sequences_are_read_in_other_microbatches(cached):
    module, prefix = cached
    tokens = np.random.default_rng(0).integers(1, 60, 20)
    lengths = [7, 1, 12]
    wanted, _ = outputs(module, packed_inputs(tokens, lengths))
    assert outputs(module, packed_inputs(tokens, lengths))[1], "nothing is read before it is complete"
    make_visible(prefix)
    found, computed = outputs(module, packed_inputs(tokens, lengths))
    assert not computed and torch.equal(found, wanted)
    found, computed = outputs(module, packed_inputs(np.concatenate([tokens[8:], tokens[:7]]), [12, 7]))
    assert not computed
    torch.testing.assert_close(found, torch.cat([wanted[8:], wanted[:7]]))
    _, computed = outputs(module, packed_inputs(tokens, [8, 12]))
    assert computed, "it is another sequence"


def test_answers_depend_on_the_prompt_that_they_share(cached):
    module, prefix = cached
    mask = np.ones(3, bool)
    answers = [Answer(np.array(tokens), mask) for tokens in ([5, 6, 7], [8, 9, 10])]
    groups = [
        pack_groups([PromptGroup(i, np.array(prompt), answers)]).inputs for i, prompt in enumerate(([1, 2], [3, 4]))
    ]
    wanted = [outputs(module, inputs)[0] for inputs in groups]
    make_visible(prefix)
    for inputs, expected in zip(groups, wanted, strict=True):
        found, computed = outputs(module, inputs)
        assert not computed and torch.equal(found, expected)


def test_what_will_not_occur_again_is_not_stored(cached):
    module, prefix = cached
    inputs = packed_inputs(np.arange(1, 9), [8])
    with prefix.without_storing():
        outputs(module, inputs)
    with pytest.raises(RuntimeError, match="stop"), torch.no_grad():
        decoder_layers(module)[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
        module(**inputs)
    make_visible(prefix)
    assert prefix.store.num_tokens == 8 and "forward" not in decoder_layers(module)[0].__dict__


def test_another_type_is_an_error(tmp_path):
    module, store = packed_model(num_hidden_layers=2).eval(), HiddenStates(tmp_path, "a model", "0")
    FrozenPrefix(module, Prefix(1, 2, module.config.hidden_size), store, torch.bfloat16)
    inputs = packed_inputs(np.arange(1, 9), [8])
    refused("expected layers in torch.bfloat16, got torch.float32", outputs, module, inputs)

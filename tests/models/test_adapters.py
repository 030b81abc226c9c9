"""Adapters in a model on the meta device: first values, names, and everything that can be wrong with the settings."""

import math
import sys

import peft
import pytest
import torch
from packed_models import first_values
from tiny_qwen2 import QWEN2
from torch import nn
from user_errors import refused

from odc_mpi.models import build as models
from odc_mpi.models.adapters.add import add_adapters, add_in_forward, base_name, is_adapter
from odc_mpi.models.adapters.check import check_base, part_digests

LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all-linear", "modules_to_save": None}
UNTIED = QWEN2 | {"tie_word_embeddings": False}


def adapted(settings=UNTIED, seed=0, dtype=torch.float32, **changes):
    return add_adapters(models.from_config(settings, 0), LORA | changes, seed, dtype)


def test_adapters_alone_are_trained_and_nothing_has_memory():
    meta_model = adapted(dtype=torch.bfloat16)
    for name, parameter in meta_model.module.named_parameters():
        assert parameter.is_meta
        assert parameter.requires_grad == is_adapter(name)
        assert parameter.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16)


def test_first_values_are_those_of_peft_and_the_base_is_as_it_was():
    values, base = first_values(adapted()), first_values(models.from_config(UNTIED, 0))
    for name, value in values.items():
        if ".lora_A." in name:
            numel = 32 if "down_proj" not in name else 48
            assert value.abs().max() <= 1 / math.sqrt(numel) and value.std() == pytest.approx(
                1 / math.sqrt(3 * numel), rel=0.25
            )
        elif ".lora_B." in name:
            assert not value.any()
        else:
            assert torch.equal(value, base[base_name(name)])
    assert {base_name(name) for name in values if not is_adapter(name)} == base.keys()


def test_adapters_depend_on_seed_and_name_alone():
    one, two, other = first_values(adapted()), adapted(), first_values(adapted(seed=1))
    a, b = (f"model.layers.{i}.mlp.up_proj.lora_A.default.weight" for i in (0, 1))
    assert torch.equal(two.weights.read(a, 7, 20), one[a].view(-1)[7:20]), "whatever was read before"
    assert not torch.equal(one[a], one[b]) and not torch.equal(one[a], other[a])


def test_a_fully_trained_module_begins_as_the_base():
    meta_model = adapted(dtype=torch.bfloat16, target_modules=["q_proj"], modules_to_save=["lm_head"])
    values = first_values(meta_model)
    assert torch.equal(values["lm_head.modules_to_save.default.weight"], values["lm_head.original_module.weight"])
    trained = {name for name, p in meta_model.module.named_parameters() if p.requires_grad}
    assert "lm_head.modules_to_save.default.weight" in trained and len(trained) == 1 + 2 * 2
    assert meta_model.adapter["modules_to_save"] == ["lm_head"] and meta_model.adapter["target_modules"] == ["q_proj"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_modules": ["q_proj", "qproj"]}, "lora.target_modules: no module is named qproj, expected some of "
         "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens, which is a Embedding"),
        ({"modules_to_save": ["head"]}, "lora.modules_to_save: no module is named head, expected some of ...lm_head"),
        ({"target_modules": ["lm_head"], "tied": True},
         "lora.target_modules: lm_head shares its weights between embedding and head"),
        ({"modules_to_save": ["embed_tokens"], "tied": True},
         "lora.modules_to_save: embed_tokens shares its weights between embedding and head"),
        ({"target_parameters": ["embed_tokens.weight"], "tied": True},
         "lora.target_parameters: embed_tokens.weight shares its weights between embedding and head"),
        ({"target_modules": []}, "lora.target_modules: expected names of linear layers, or lora.target_parameters"),
        ({"target_parameters": ["experts.up_proj"], "model_type": "granitemoe"},
         "lora.target_parameters: no parameter...experts.up_proj, expected some of down_proj, gate_up_proj"),
        ({"lora_dropout": 0.1, "model_type": "mixtral"},
         "peft cannot adapt Mixtral...: it has no dropout for fused experts: set lora.dropout to 0, got 0.1"),
        ({"layers_to_transform": [2]}, "lora.layers_to_transform: expected layers from 0 to 1, got 2"),
        ({"layers_to_transform": [1]}, "lora.layers_to_transform: expected names in lora.target_modules, got "
         "all-linear: choose among down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
        ({"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"], "layers_to_transform": [1],
          "model_type": "granitemoe"}, "peft does not apply it to lora.target_parameters, and experts.down_proj is "
         "also in model.layers.0.block_sparse_moe.experts.down_proj: name parameters with their layers"),
    ],
    ids=["target", "embedding", "saved", "tied target", "tied saved", "tied parameter", "no target", "parameter",
         "dropout", "missing layer", "layers of all", "layers of parameters"],
)  # fmt: skip
def test_user_errors(changes, words):
    changes = dict(changes)
    settings = UNTIED | {"tie_word_embeddings": changes.pop("tied", False)}
    settings["model_type"] = changes.pop("model_type", "qwen2")
    refused(words, adapted, settings, **changes)


class Experts(nn.Module):
    """Returns its parameter; `[experts, in, out]` if it is transposed."""

    def __init__(self, shape, is_transposed):
        super().__init__()
        self.up, self.is_transposed = nn.Parameter(torch.randn(shape)), is_transposed

    def forward(self, factor):
        return factor * self.up


@pytest.mark.parametrize(
    ("shape", "is_transposed"), [((3, 7, 5), False), ((3, 5, 7), True), ((7, 5), False)], ids=["out", "in", "single"]
)
def test_a_parameter_with_its_adapter_is_that_of_peft(shape, is_transposed):
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=[], target_parameters=["experts.up"])
    module = nn.ModuleDict({"experts": Experts(shape, is_transposed)})
    module = peft.inject_adapter_in_model(config, module)
    nn.init.normal_(module["experts"].lora_B.default.weight)
    original, factor = module["experts"].get_base_layer().up, torch.ones(())
    wanted = module["experts"](factor)
    add_in_forward(module)
    torch.testing.assert_close(module["experts"](factor), wanted)
    assert not torch.allclose(wanted, original) and module["experts"].get_base_layer().up is original
    module["experts"]._disable_adapters = True
    assert torch.equal(module["experts"](factor), original)


def test_peft_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    refused("pip install 'odc_mpi[lora]'", adapted)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_digest_of_a_drawn_base(size):
    weights = [models.from_config(UNTIED, seed).weights for seed in (0, 1)]
    shares = [part_digests(weights[0], rank, size) for rank in range(size)]
    assert sum(map(len, shares)) == len(weights[0].parts())
    record = {"path": None, "config": UNTIED, "seed": 0, "sha256": {k: v for share in shares for k, v in share.items()}}
    for rank in range(size):
        check_base(weights[0], record, rank, size)
        refused("a qwen2...seed 0, got a different one: ... differs", check_base, weights[1], record, rank, size)

"""Adapters that peft itself saved: the same logits, and everything that a directory can lack."""

import json
import shutil

import pytest
import torch
from packed_models import materialized
from safetensors.torch import load_file, save_file
from tiny_qwen2 import QWEN2
from transformers import AutoConfig, AutoModelForCausalLM
from user_errors import refused

from odc_mpi.models.load import load_model

peft = pytest.importorskip("peft")

TOKENS = torch.arange(9)[None]

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of peft itself


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Adapters with a fully trained head, and peft's outputs with them."""
    return save(
        tmp_path_factory.mktemp("saved"), r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]
    )


def save(directory, r, changes=(), **lora):
    """Save a base and adapters, and return the directory of the adapters and peft's outputs with them."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**QWEN2 | {"tie_word_embeddings": False} | dict(changes))
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "base")
    base = AutoModelForCausalLM.from_pretrained(directory / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=r, **lora))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory / "adapters")
    return directory / "adapters", model.eval()(TOKENS).logits


@pytest.fixture
def adapters(saved, tmp_path):
    """A copy of the directory to spoil, and its configuration."""
    return shutil.copytree(saved[0], tmp_path / "copy")


def change(adapters, **changes):
    path = adapters / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # of peft itself
def test_logits_with_adapters_of_experts(tmp_path):
    """As peft chooses them in Mixtral, with a rank and an alpha of their own."""
    changes = {"model_type": "mixtral", "num_local_experts": 4}
    assert_logits(*save(tmp_path, r=2, changes=changes, target_modules="all-linear"))


def test_logits_are_those_of_peft(saved):
    assert_logits(*saved)


def assert_logits(adapters, wanted):
    module = materialized(load_model(adapters))
    module.set_attn_implementation("sdpa")
    torch.testing.assert_close(module.eval()(TOKENS).logits, wanted)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_model_name_or_path": "not/there"}, "base model is not in not/there (no config.json there)"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path, the directory of the base, is missing"),
        ({"use_dora": True}, "expected plain LoRA, got use_dora True"),
        ({"use_rslora": True}, "expected plain LoRA, got use_rslora True"),
        ({"init_lora_weights": "pissa"}, "expected plain LoRA, got init_lora_weights 'pissa'"),
        ({"peft_type": "IA3"}, "expected peft_type LORA, got 'IA3'"),
        ({"r": 2}, "expected ...lora_A.weight of the shape [2, 32], got [4, 32]"),
        ({"target_modules": ["q_proj"]}, "down_proj.lora_A.weight is not in the model"),
    ],
)
def test_other_configurations_are_refused(adapters, changes, words):
    change(adapters, **changes)
    refused(words, load_model, adapters)


def test_missing_and_damaged_files_are_refused(adapters):
    file = adapters / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop("base_model.model.lm_head.weight")
    save_file(tensors, file)
    refused("base_model.model.lm_head.weight is missing", load_model, adapters)
    file.write_bytes(b"damaged")
    refused("cannot read", load_model, adapters)
    file.unlink()
    refused("expected adapter_model.safetensors in ..., found none", load_model, adapters)
    (adapters / "adapter_config.json").write_text("{")
    refused("expected a JSON object of settings", load_model, adapters)

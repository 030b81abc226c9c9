"""Names of attention: supported ones are implemented, and each other one of transformers has a reason."""

import argparse
import json

import pytest
from tiny_qwen2 import QWEN2
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from odc_mpi.cli.options import attention_name
from odc_mpi.errors import UserError
from odc_mpi.models import build as models
from odc_mpi.models.attention import IMPLEMENTATIONS
from odc_mpi.models.configuration import ATTENTION_IMPLEMENTATIONS, unsupported_reason


def test_supported_attention_is_implemented():
    assert set(ATTENTION_IMPLEMENTATIONS) == IMPLEMENTATIONS.keys()


def test_every_other_attention_of_transformers_is_refused_with_a_reason():
    theirs = {*AttentionInterface(), "kernels-community/flash-attn2"} - {
        *ATTENTION_IMPLEMENTATIONS,
        *IMPLEMENTATIONS.values(),
    }
    assert {"flash_attention_2", "flash_attention_3", "flex_attention", "paged|eager"} <= theirs
    assert [name for name in theirs if not unsupported_reason(name)] == []
    assert unsupported_reason("fast") == unsupported_reason(None) == unsupported_reason(3) == ""


def test_the_option_prints_the_reason():
    assert attention_name("eager") == "eager"
    with pytest.raises(argparse.ArgumentTypeError, match=r"^expected sdpa or eager, got 'flash_attention_3' \(a lib"):
        attention_name("flash_attention_3")


def test_names_in_a_model_s_own_configuration_do_not_count(tmp_path):
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN2)).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    for name in ("attn_implementation", "_attn_implementation"):
        (tmp_path / "config.json").write_text(json.dumps(content | {name: "flash_attention_2"}))
        assert models.from_directory(tmp_path).module.config._attn_implementation == IMPLEMENTATIONS["sdpa"]
        with pytest.raises(UserError, match=f"unknown setting model.config.{name}"):
            models.from_config(QWEN2 | {name: "flash_attention_2"}, seed=0)

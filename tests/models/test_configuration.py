"""Settings of `model.config` beside `model.path` give the configuration of transformers; names of attention."""

import argparse
import json
import shutil

import pytest
import torch
import transformers
from tiny_qwen2 import SIZES
from user_errors import refused

from odc_mpi.cli.options import attention_name
from odc_mpi.models import build
from odc_mpi.models.attention import IMPLEMENTATIONS
from odc_mpi.models.configuration import (
    ATTENTION_IMPLEMENTATIONS,
    full_configuration,
    override_config,
    unsupported_reason,
)

TINY = {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
OLD_YARN = {("type" if key == "rope_type" else key): value for key, value in YARN.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    config = transformers.AutoConfig.for_model("qwen2", **TINY)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("from_checkpoint", [False, True])
@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ({"rope_parameters": YARN}, {"rope_parameters": {**YARN, "rope_theta": 5e5}}),
        ({"rope_scaling": YARN}, {"rope_parameters": {**YARN, "rope_theta": 5e5}}),
        ({"rope_scaling": OLD_YARN}, {"rope_parameters": {**YARN, "rope_theta": 5e5}}),
        ({"rope_theta": 1e4}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ({"rms_norm_eps": 1e-3, "attention_dropout": 0.5}, {"rms_norm_eps": 1e-3, "attention_dropout": 0.5}),
    ],
)
def test_the_function_is_that_of_a_configuration_with_these_values(saved, overrides, wanted, from_checkpoint):
    if from_checkpoint:
        content = full_configuration(build.from_directory(saved).module)
        config = build.from_saved_config(content, overrides=overrides).module.config
    else:
        config = build.from_directory(saved, overrides=overrides).module.config
    assert {key: getattr(config, key) for key in wanted} == wanted
    reference = transformers.AutoConfig.for_model("qwen2", **TINY | wanted)
    tokens = torch.arange(40)[None]
    logits = []
    for each in (config, reference):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(each, attn_implementation="eager", dtype=torch.float32)
        logits.append(model.eval()(tokens).logits)
    assert torch.equal(*logits)


def test_derived_settings_are_derived_again(saved):
    overrides = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    content = transformers.PreTrainedConfig.get_config_dict(saved)[0]
    content.pop("layer_types", None)  # as published files lack it
    config = transformers.AutoConfig.from_pretrained(saved)
    changed = override_config(config, content, overrides)
    assert changed.layer_types == ["full_attention", "sliding_attention"] and changed.sliding_window == 8


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            {"rms_norm_epsilon": 1},
            "unknown setting model.config.rms_norm_epsilon for model_type qwen2: ...rms_norm_eps",
        ),
        ({"hidden_size": 64}, "of shape [64, 64], as the configuration says, got [64, 32]"),
        ({"sliding_window": 8}, "model.config.sliding_window: expected 8 to take effect, but ... make it None"),
        ({"rope_parameters": {"rope_type": "bent"}}, "model...: there is no ...bent"),
        ({"num_hidden_layers": 10**9}, "model.config.num_hidden_layers: expected at most"),
        (
            {"rope_parameters": {"facto": 8}},
            "model.config.rope_parameters.facto: expected 8 ...ignore it",
        ),
        ({"rope_scaling": {"factor": 8.0}}, "rope_parameters.factor: ... of qwen2 ignore it"),
        (
            {"rope_scaling": {"full_attention": {"rope_type": "linear"}}},
            "unknown ...rope_parameters.full_attention",
        ),
    ],
)
def test_what_cannot_take_effect_is_refused(saved, overrides, words):
    refused(words, build.from_directory, saved, overrides=overrides)
    if "hidden_size" not in overrides:
        refused(words, build.from_config, {"model_type": "qwen2", **SIZES, **overrides}, seed=0)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("gemma3n_text", {"intermediate_size": 96}), ("gemma4_text", {"head_dim": 16}), ("laguna", {"vocab_size": 64})],
)
def test_settings_of_each_layer_and_defaults_are_accepted(family, changes):
    default = transformers.AutoConfig.for_model(family)
    changed = override_config(default, {}, changes)
    assert changed.to_dict() == transformers.AutoConfig.for_model(family, **changes).to_dict()


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rotary_settings_of_a_layer_type_may_have_the_old_name_of_their_type(key):
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.AutoConfig.for_model("gemma3", text_config=SIZES, vision_config=vision)
    rope = {key: {"full_attention": {"type": "linear", "factor": 8.0}}}
    for changed in (
        override_config(config, config.to_dict(), {"text_config": rope}).text_config,
        build.from_config({"model_type": "gemma3_text", **SIZES, **rope}, seed=0).module.config,
    ):
        wanted = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
        assert changed.rope_parameters["full_attention"] == wanted
        assert changed.rope_parameters["sliding_attention"]["rope_type"] == "default"
    for wrong, words in (
        ({"factor": 8.0}, r"unknown setting model.config.rope_parameters.factor...expected some of ...full_attention"),
        ({"sliding_attention": {"facto": 8}}, r"model.config.rope_parameters.sliding_attention.facto: "),
    ):
        refused(words, build.from_config, {"model_type": "gemma3_text", **SIZES, key: wrong}, seed=0)


def test_supported_attention_is_implemented():
    assert set(ATTENTION_IMPLEMENTATIONS) == IMPLEMENTATIONS.keys()


def test_every_other_attention_of_transformers_is_refused_with_a_reason():
    ours = {*ATTENTION_IMPLEMENTATIONS, *IMPLEMENTATIONS.values()}
    theirs = {*transformers.AttentionInterface(), "kernels-community/flash-attn2"} - ours
    assert {"flash_attention_2", "flash_attention_3", "flex_attention", "paged|eager"} <= theirs
    assert [name for name in theirs if not unsupported_reason(name)] == []
    assert unsupported_reason("fast") == unsupported_reason(None) == unsupported_reason(3) == ""


def test_the_option_prints_the_reason():
    assert attention_name("eager") == "eager"
    refused(
        "sdpa or eager, got 'flash_attention_3'", attention_name, "flash_attention_3", error=argparse.ArgumentTypeError
    )


def test_names_in_a_model_s_own_configuration_do_not_count(saved, tmp_path):
    path = shutil.copytree(saved, tmp_path / "copy") / "config.json"
    content = json.loads(path.read_text())
    for name in ("attn_implementation", "_attn_implementation"):
        path.write_text(json.dumps(content | {name: "flash_attention_2"}))
        assert build.from_directory(path.parent).module.config._attn_implementation == IMPLEMENTATIONS["sdpa"]
        settings = {"model_type": "qwen2", **SIZES, name: "flash_attention_2"}
        refused(f"unknown setting model.config.{name}", build.from_config, settings, seed=0)

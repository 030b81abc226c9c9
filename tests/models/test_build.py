"""Models from a configuration and from a directory: values, slices, and everything that can be wrong with either."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
import transformers
from packed_models import LargestTensor
from ranks import LocalGroup, LocalTransport
from safetensors.torch import load_file, save_file
from tiny_qwen2 import QWEN2
from user_errors import refused

from odc_mpi.data.microbatch import packed_inputs
from odc_mpi.models import build as models
from odc_mpi.shard.model import ShardedModel

LLAMA = QWEN2 | {"model_type": "llama"}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SLIDING = QWEN2 | {"model_type": "mistral", "sliding_window": 5}


def shard(meta_model):
    return ShardedModel(meta_model.module, LocalTransport(LocalGroup(1), 0), weights=meta_model.weights)


def stock(settings):
    """The same model as transformers itself makes it."""
    config = transformers.AutoConfig.for_model(**settings)
    torch.manual_seed(5)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    stock(QWEN2).save_pretrained(path)
    return path


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


class TestFromConfig:
    def test_values_are_distributed_as_in_transformers(self):
        meta_model, reference = models.from_config(QWEN2, seed=0), stock(QWEN2)
        for name, parameter in reference.named_parameters():
            values = meta_model.weights.read(name, 0, parameter.numel())
            assert values.std() == pytest.approx(parameter.std().item(), rel=0.2, abs=1e-6), name
            assert values.mean() == pytest.approx(parameter.mean().item(), abs=0.01), name

    def test_values_depend_on_seed_and_name_alone(self):
        one, two, other = (models.from_config(QWEN2, seed).weights for seed in (3, 3, 4))
        names = ["model.embed_tokens.weight", *(f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))]
        whole = {name: one.read(name, 0, 32) for name in names}
        for name in reversed(names):
            assert torch.equal(two.read(name, 7, 20), whole[name][7:20]), "whatever was read before"
            assert not torch.equal(other.read(name, 0, 32), whole[name])
        assert not torch.equal(whole[names[1]], whole[names[2]])

    @pytest.mark.parametrize("settings", [QWEN2, SLIDING], ids=["qwen2", "mistral"])
    def test_nothing_of_the_size_of_the_squared_pack_is_made(self, settings):
        """Not by the attention, and not by transformers around it, for a pack of many short sequences."""
        num_tokens = 1024
        meta_model = models.from_config(settings | {"max_position_embeddings": num_tokens}, seed=0)
        model = shard(meta_model)
        inputs = packed_inputs(np.arange(num_tokens) % 64, [16] * (num_tokens // 16))
        with model.minibatch(), LargestTensor() as made:
            loss = model(**inputs, labels=inputs["input_ids"]).loss
            loss.backward()
        assert num_tokens * 64 <= made.numel < num_tokens**2 / 4  # the logits are the largest

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"hidden_size": 8}, "model_type"),
            ({"model_type": "qwen22"}, "qwen22"),
            ({"model_type": "qwen2", "hiden_size": 8}, "did you mean hidden_size"),
            ({"model_type": "qwen2", "hidden_size": "wide"}, "hidden_size"),
            ({"model_type": "vit"}, "model.config"),
            (LLAMA | {"num_attention_heads": 5}, "model.config"),
            (LLAMA | {"attention_dropout": -1}, "attention_dropout from 0 to 1, got -1"),
            (LLAMA | {"dtype": []}, "model.config: transformers does not accept it"),
            ({"model_type": "bart", "encoder_layers": 1}, "its loss does not shift the labels"),
            ({"model_type": "bert", "num_hidden_layers": 1}, "not causal"),
            (LLAMA | {"model_type": "gemma3_text", "use_bidirectional_attention": True},
             "use_bidirectional_attention is True"),
            ({"model_type": "gemma3"}, "model.config.model_type: gemma3 is multimodal: set it to gemma3_text"),
            ({"model_type": "qwen2_vl"}, "qwen2_vl is multimodal: set it to qwen2"),
            (QWEN2 | {"num_key_value_heads": 3}, "model.config: Qwen2ForCausalLM cannot run"),
            (QWEN2 | {"hidden_size": 36}, "model.config: Qwen2ForCausalLM cannot run"),
            ({"model_type": "qwen2", 3: 4}, "unknown setting model.config.3"),
            ({"model_type": ["qwen2"]}, "model.config.model_type: transformers knows no ['qwen2']"),
            ({"model_type": "bamba", "num_hidden_layers": 2, "z_loss_coefficient": 0.1},
             "BambaForCausalLM adds a z-loss"),
        ],
    )  # fmt: skip
    def test_user_errors(self, settings, words):
        refused(words, lambda: shard(models.from_config(settings, seed=0)))


class TestFromDirectory:
    def test_bf16_files_and_a_tied_head(self, tmp_path):
        reference = stock(QWEN2 | {"tie_word_embeddings": True}).to(torch.bfloat16)
        reference.save_pretrained(tmp_path)
        model = shard(models.from_directory(tmp_path))
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, reference.state_dict()[name].float()), name

    def test_a_head_that_is_stored_beside_the_embedding_to_which_it_is_tied(self, copy):
        """transformers ties them only if they are equal."""
        file, config = copy / "model.safetensors", copy / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
        different = "embed_tokens.weight and another: set tie_word_embeddings to false in config.json"
        refused(different, models.from_directory, copy)
        untied = models.from_directory(copy, overrides={"tie_word_embeddings": False})
        stored = load_file(file)
        assert torch.equal(untied.weights.read("lm_head.weight", 0, 32), stored["lm_head.weight"][0])
        save_file(stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
        assert "lm_head.weight" not in dict(shard(models.from_directory(copy)).module.named_parameters())
        head = stored["model.embed_tokens.weight"].clone()
        head[-1, -1] += 1
        save_file(stored | {"lm_head.weight": head}, file, {"format": "pt"})
        refused(different, lambda: shard(models.from_directory(copy)))

    def test_a_file_of_the_base_model(self, copy):
        file = copy / "model.safetensors"
        stored = load_file(file)
        save_file({name.removeprefix("model."): tensor for name, tensor in stored.items()}, file, {"format": "pt"})
        meta_model = models.from_directory(copy)
        assert torch.equal(meta_model.weights.read("model.norm.weight", 0, 32), stored["model.norm.weight"])

    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            ({"model.layers.0.input_layernorm.weight": None}, "no weights for model.layers.0.input_layernorm.weight"),
            ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "quantized"),
            ({"model.norm.weight": torch.ones(31)}, "got [31]"),
            (lambda folder: shutil.rmtree(folder), "config.json"),
            (lambda folder: os.truncate(folder / WEIGHTS, 5000), "git lfs pull"),
            (lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"), "pickled weights are not read"),
            ((INDEX, '{"weight_map": {"model.norm.weight": "lost"}}'), "model.path: cannot read"),
            *(((INDEX, text), "not an index") for text in ("{}", "[]", "[" * 100_000)),
            *(
                ((INDEX, text), "not an index")
                for text in ('{"weight_map": {"a": 3}}', '{"weight_map": {"a": "\\u0000"}}')
            ),
            *((("config.json", text), "not usable") for text in ("{ not json", "[]", "null")),
            (("config.json", {"num_hidden_layers": 10**8}), "num_hidden_layers: expected at most 10000, got 100000000"),
            *((("config.json", each), "not usable") for each in ({"hidden_size": "wide"}, {"model_type": "qwen22"})),
            (("config.json", {"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"}), "not usable"),
        ],
    )
    def test_user_errors(self, copy, damage, words):
        if isinstance(damage, dict):
            changed = load_file(copy / WEIGHTS) | damage
            save_file({k: v for k, v in changed.items() if v is not None}, copy / WEIGHTS, {"format": "pt"})
        elif isinstance(damage, tuple):
            name, text = damage
            if isinstance(text, dict):
                text = json.dumps(json.loads((copy / name).read_text()) | text)
            (copy / name).write_text(text)
        else:
            damage(copy)
        assert str(copy) in refused(words, models.from_directory, copy)

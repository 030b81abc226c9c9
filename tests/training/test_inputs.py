"""Inputs of a run: whether data set and model fit each other."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
import transformers
from tiny_qwen2 import QWEN2
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as vocabularies
from user_errors import refused

from odc_mpi.data.dataset.format import DamagedDatasetError, vocabulary_digest
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.plan.cost import CostModel, flops_cost
from odc_mpi.data.tokenizer import load_tokenizer, tokenizer_files, write_files
from odc_mpi.models.build import from_config
from odc_mpi.simulate.scenario import lengths_by_name
from odc_mpi.training import settings as configuration
from odc_mpi.training.inputs import initial_cost_model, open_inputs
from odc_mpi.training.source import DamageFoundError, PlaceholderDataset

MODEL = QWEN2 | {"vocab_size": 60, "num_hidden_layers": 1}


def write(path: Path, largest: int, vocab_size: int, vocabulary: str = "", files: dict | None = None) -> None:
    names = {"tokenizer": "none", "source": "test", "vocabulary": vocabulary, "tokenizer_files": files}
    with DatasetWriter(path, vocab_size=vocab_size, **names) as writer:
        writer.append(np.array([1, largest, 2], dtype=np.uint32), np.ones(3, dtype=bool))


def check(data: Path, model: Path | dict) -> None:
    section = configuration.ModelConfig(**({"config": model} if isinstance(model, dict) else {"path": str(model)}))
    open_inputs(configuration.Config(model=section, data=configuration.DataConfig(path=str(data))), 0, 1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A model whose tokenizer lists 64 tokens, of which its embedding knows 60."""
    path = tmp_path_factory.mktemp("model")
    config = transformers.AutoConfig.for_model(**MODEL)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    words = Tokenizer(vocabularies.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


def test_costs_have_names():
    meta_model = from_config(MODEL, 0)
    num_parameters = sum(p.numel() for p in meta_model.module.parameters()) - 60 * 32  # without the embedding
    flops = flops_cost(num_parameters, 1, 32)
    for name, wanted in (("linear", CostModel()), ("flops", flops), ("fitted", flops)):
        assert initial_cost_model(configuration.DataConfig("data.h5", cost=name), meta_model) == wanted


def test_tokens_that_the_model_does_not_know(tmp_path):
    write(tmp_path / "used.h5", 60, 60)
    refused("contains the token id 60, the model has 60 tokens: prepare it with", check, tmp_path / "used.h5", MODEL)
    write(tmp_path / "listed.h5", 59, 64)
    refused("the model has 60: prepare it with the model's own tokenizer", check, tmp_path / "listed.h5", MODEL)
    write(tmp_path / "good.h5", 59, 60)
    check(tmp_path / "good.h5", MODEL)


def test_the_model_s_own_tokenizer_may_list_tokens_that_the_data_does_not_have(tmp_path, directory):
    vocabulary = vocabulary_digest(load_tokenizer(directory).get_vocab())
    write(tmp_path / "listed.h5", 59, 64, vocabulary)
    check(tmp_path / "listed.h5", directory)
    write(tmp_path / "used.h5", 60, 64, vocabulary)
    refused("save the model after resize_token_embeddings(64)", check, tmp_path / "used.h5", directory)
    write(tmp_path / "foreign.h5", 59, 64, vocabulary[::-1])
    refused("with a tokenizer that differs from that in model.path", check, tmp_path / "foreign.h5", directory)
    bare = shutil.copytree(directory, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    refused("save the model after resize_token_embeddings(64)", check, tmp_path / "listed.h5", bare)


def test_equal_files_are_one_tokenizer_even_if_a_family_adds_tokens_on_loading(tmp_path, directory):
    files, alone = tokenizer_files(directory), tmp_path / "alone"
    del files["config.json"]  # without it the class of the family is not used
    alone.mkdir()
    write_files(files, alone)
    vocabulary = vocabulary_digest(load_tokenizer(alone).get_vocab())
    assert vocabulary != vocabulary_digest(load_tokenizer(directory).get_vocab())
    write(tmp_path / "same.h5", 59, 64, vocabulary, files)
    check(tmp_path / "same.h5", directory)
    write(tmp_path / "other.h5", 59, 64, vocabulary, files | {"tokenizer.json": b"{}"})
    refused("with a tokenizer that differs from that in model.path", check, tmp_path / "other.h5", directory)


def test_a_frozen_prefix_requires_packing_and_data_that_occur_again(tmp_path):
    write(tmp_path / "good.h5", 59, 60)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    common = ["--run.device=cpu", "--lora.r=2", "--model.cache_frozen_prefix", "--model.config.vocab_size=60"]
    for arguments, words in (
        ((f"--data.path={tmp_path}/good.h5", "--model.config.model_type=falcon"), "its attention accepts no"),
        (
            (f"--data.path={tmp_path}/prompts.jsonl", "--run.objective=grpo", "--rl.reward_funcs=f",
             "--rl.tokenizer=t", "--model.config.model_type=qwen2"),
            "completions differ in each step",
        ),
    ):  # fmt: skip
        config = configuration.load(None, [*common, *arguments])
        refused(
            f"model.cache_frozen_prefix: expected false with this model and objective, got true: {words}",
            open_inputs,
            config,
            0,
            1,
        )


def test_errors_name_the_setting_of_the_data_set(tmp_path):
    path = tmp_path / "data.h5"
    write(path, 59, 60)
    data = configuration.DataConfig(path=str(path), eval_path=f"{path}.missing", minibatch_sequences=1)
    config = configuration.Config(model=configuration.ModelConfig(config=MODEL), data=data)
    refused("got no file: change data.eval_path", open_inputs, config, 0, 1)
    refused("got no file: change --lengths", lengths_by_name, f"{tmp_path}/missing.h5")


def test_damaged_data_are_never_replaced_for_code_that_does_not_discard_them(tmp_path):
    """Benchmarks and a user's own loop read from these loaders. Only a run replaces damaged sequences."""
    path = tmp_path / "data.h5"
    write(path, 59, 60)
    with h5py.File(path, "a") as file:
        file["tokens"][1] = 3
    section = configuration.ModelConfig(config=MODEL)
    data = configuration.DataConfig(path=str(path), eval_path=str(path), minibatch_sequences=1)
    inputs = open_inputs(configuration.Config(model=section, data=data), 0, 1)
    minibatch = next(inputs.sequence_loader)
    for dataset in (minibatch.dataset, inputs.dataset, inputs.evaluation):
        refused("sequence 0", dataset.__getitem__, 0, error=DamagedDatasetError)
    placeholders = PlaceholderDataset(inputs.dataset)
    (microbatch,) = placeholders.apply(minibatch)
    assert microbatch.inputs["input_ids"].tolist() == [[0, 0, 0]] and microbatch.num_tokens == 2
    world = SimpleNamespace(gather_objects=lambda message: [None, message])
    refused("rank 1: the data set...sequence 0", placeholders.raise_damage, world, error=DamageFoundError)
    inputs.close()

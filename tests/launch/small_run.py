"""A small data set and configuration for real launches, as fixtures."""

import sys

import numpy as np
import pytest
import torch
import transformers
import yaml
from mpi_launch import end_all
from tiny_qwen2 import QWEN2

from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.tokenizer import tokenizer_files, write_files
from odc_mpi.observe.metrics import read_run_metrics

MODEL = QWEN2 | {"intermediate_size": 64}


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "small.h5")


@pytest.fixture
def config(data, tmp_path):
    """A configuration file and the run directory it names."""
    return write_config(data, tmp_path)


@pytest.fixture(autouse=True)
def nothing_left_running():
    yield
    end_all()


def write_data(path):
    """Sequences that count up and wrap: something that a small model learns at once."""
    rng = np.random.default_rng(1)
    return write_sequences(
        path, ((rng.integers(60) + np.arange(length)) % 60 for length in rng.integers(3, 30, size=60))
    )


def write_sequences(path, sequences):
    with DatasetWriter(path, vocab_size=60, tokenizer="none", source="random") as writer:
        for tokens in sequences:
            writer.append(tokens.astype(np.uint32), np.ones(len(tokens), dtype=bool))
    return path


def write_model(data, directory, **sizes):
    """Write a model directory with random weights, and the tokenizer of a data set."""
    directory.mkdir()
    write_files(tokenizer_files(data), directory)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**MODEL | sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def losses(run_dir):
    """The losses in metrics.jsonl, or of all islands together, of every step from the first on."""
    lines = read_run_metrics(run_dir, sys.maxsize)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def last_step(run_dir):
    """The last complete line of metrics.jsonl; 0 if there is none."""
    return max((line["step"] for line in read_run_metrics(run_dir, sys.maxsize)), default=0)


def write_config(data, directory):
    settings = {
        "model": {"config": MODEL},
        "data": {"path": str(data), "minibatch_sequences": 6, "max_tokens_per_microbatch": 64},
        "optim": {"learning_rate": 0.01, "warmup_steps": 2},
        "run": {"steps": 8, "dir": str(directory / "run"), "threads": 1},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path

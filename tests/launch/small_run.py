"""A small data set and configuration for real launches, as fixtures."""

import numpy as np
import pytest
import yaml

from odc_mpi.data.dataset import DatasetWriter

MODEL = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "small.h5"
    rng = np.random.default_rng(1)
    with DatasetWriter(path, vocab_size=60, tokenizer="none", source="random") as writer:
        for length in rng.integers(3, 30, size=60):
            # Counting up and wrapping: something that a small model learns at once.
            tokens = (rng.integers(60) + np.arange(length)) % 60
            writer.append(tokens.astype(np.uint32), np.ones(length, dtype=bool))
    return path


@pytest.fixture
def config(data, tmp_path):
    """A configuration file and the run directory it names."""
    return write_config(data, tmp_path)


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

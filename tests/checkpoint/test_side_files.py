"""Where transformers stops generating from an exported model: its tokenizer, its template, and the special tokens."""

import json

import huggingface_hub
import numpy as np
import pytest

from odc_mpi.checkpoint.side_files import SideFiles
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.tokenizer import PAD, TURN_END, serialize_tokenizer, train_tokenizer, write_files
from odc_mpi.errors import UserError

SIZE = 264
CONFIG = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "vocab_size": SIZE}
TRAINING_TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a few words"], SIZE)


@pytest.fixture
def end(tokenizer):
    """The tokens that end a sequence and a turn."""
    return [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(TURN_END)]


def write_data(path, files):
    with DatasetWriter(path, vocab_size=SIZE, tokenizer="", source="", tokenizer_files=files) as writer:
        writer.append(np.arange(5, dtype=np.uint32), np.ones(5, dtype=bool))
    return path


def settings(data, base=None):
    return {
        "model": {"param_dtype": "float32", "attn_implementation": "sdpa", "path": base and str(base)},
        "data": {"path": str(data)},
    }


def test_a_model_from_a_configuration_has_the_tokenizer_s_tokens(tokenizer, end, tmp_path):
    data = write_data(tmp_path / "data.h5", serialize_tokenizer(tokenizer))
    side_files = SideFiles(settings(data), None)
    expected = {"eos_token_id": end, "pad_token_id": tokenizer.convert_tokens_to_ids(PAD)}
    # The default bos of Llama, 1, is another token here, and the tokenizer has none.
    assert side_files.model_config(CONFIG) == CONFIG | expected | {"bos_token_id": None}
    assert side_files.generation_config(CONFIG) == expected


@pytest.mark.parametrize("files", [{}, {"tokenizer.json": b"damaged"}], ids=["none", "does not load"])
def test_without_a_tokenizer_the_configuration_s_tokens_stay(files, tmp_path):
    side_files = SideFiles(settings(write_data(tmp_path / "data.h5", files)), None)
    assert side_files.tokenizer == files
    assert side_files.model_config(CONFIG) == CONFIG
    assert side_files.generation_config(CONFIG) == {"bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize("has_template", [True, False], ids=["a chat model", "a base without a template"])
def test_the_base_has_its_own_template_and_settings(tokenizer, end, tmp_path, has_template):
    """The data was prepared with a template for training, which ends turns by the token that ends a sequence."""
    files = serialize_tokenizer(tokenizer)
    template = files.pop("chat_template.jinja")
    base = tmp_path / "base"
    base.mkdir()
    write_files(files | ({"chat_template.jinja": template} if has_template else {}), base)
    content = {"temperature": 0.6, "eos_token_id": 9, "bos_token_id": 7, "num_return_sequences": 3, "num_beams": 4}
    (base / "generation_config.json").write_text(json.dumps(content | {"stop_strings": ["a"], "token_healing": True}))
    data = write_data(tmp_path / "data.h5", files | {"chat_template.jinja": TRAINING_TEMPLATE.encode()})
    side_files = SideFiles(settings(data, base), None)
    assert side_files.tokenizer["chat_template.jinja"] == (template if has_template else TRAINING_TEMPLATE.encode())
    ends = [*end, 9] if has_template else [end[0], 9]
    pad = tokenizer.pad_token_id
    assert side_files.generation_config(CONFIG) == {
        "temperature": 0.6,
        "bos_token_id": 7,
        "eos_token_id": ends,
        "pad_token_id": pad,
    }
    assert side_files.model_config(CONFIG)["bos_token_id"] == 1, "that of the base, since the tokenizer has none"
    # A token beyond the embedding would not load as a pad token.
    assert side_files.model_config(CONFIG | {"vocab_size": pad})["pad_token_id"] is None
    (base / "generation_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"generation_config.json: expected a JSON object of settings, got"):
        side_files.generation_config(CONFIG)


def test_the_base_is_a_snapshot_of_a_cache_that_was_moved(tokenizer, tmp_path, monkeypatch):
    repository = tmp_path / "models--Owner--Base"
    for commit in ("a" * 40, "b" * 40):
        base = repository / "snapshots" / commit
        base.mkdir(parents=True)
        write_files(serialize_tokenizer(tokenizer), base)
        for file in ("config.json", "model.safetensors", "generation_config.json"):
            (base / file).write_text(json.dumps({"transformers_version": commit}))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("b" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    data = write_data(tmp_path / "data.h5", {})
    side_files = SideFiles(settings(data, f"/elsewhere/models--Owner--Base/snapshots/{'a' * 40}"), None)
    assert side_files.generation_config(CONFIG)["transformers_version"] == "a" * 40
    assert "tokenizer.json" in side_files.tokenizer
    assert "config.json" not in side_files.tokenizer, "the export has its own"

"""An exported model loads in transformers, with bitwise identical weights and equal logits."""

import json
import os
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checkpoint_helpers import write
from damage import flip
from ranks import run_ranks
from safetensors import SafetensorError

from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.tokenizer import TURN_END, serialize_tokenizer, train_tokenizer
from odc_mpi.errors import UserError
from odc_mpi.models import build as models
from odc_mpi.models import export as module
from odc_mpi.models.export import export
from odc_mpi.shard.model import ShardedModel

MIXTRAL = {"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
MIXTRAL |= {"vocab_size": 264, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
MIXTRAL |= {"tie_word_embeddings": True}
TOKENS = torch.arange(8)[None]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a few words"], MIXTRAL["vocab_size"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """A checkpoint of a model trained on a data set with a tokenizer, the model's whole state, and its logits."""
    directory = tmp_path_factory.mktemp("saved")
    files = {"vocab_size": MIXTRAL["vocab_size"], "tokenizer": "", "tokenizer_files": serialize_tokenizer(tokenizer)}
    with DatasetWriter(directory / "data.h5", source="", **files) as writer:
        writer.append(np.arange(5, dtype=np.uint32), np.ones(5, dtype=bool))

    def work(transport):
        meta_model = models.from_config(MIXTRAL, seed=0)
        model = ShardedModel(meta_model.module, transport, weights=meta_model.weights).eval()
        metadata = {
            "config": {
                "model": {"param_dtype": "float32", "path": None, "attn_implementation": "sdpa"},
                "data": {"path": str(directory / "data.h5")},
            },
            "transformers_config": json.loads(model.module.config.to_json_string(use_diff=False)),
            "architectures": [type(model.module).__name__],
        }
        write(directory, transport, 2, model, torch.optim.AdamW(model.shard_parameters()), 1, metadata)
        bounds = torch.tensor([0, 8], dtype=torch.int32)
        with torch.no_grad():
            packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "use_cache": False}
            logits = model.module(input_ids=TOKENS, position_ids=TOKENS, **packed).logits
        return model.state_dict(), logits

    state, logits = run_ranks(2, work, torch.float32, torch.float32)[0]
    return directory / "step_00000001", state, logits


def test_it_reports_the_same(saved, tmp_path, tokenizer):
    directory, state, logits = saved
    with Checkpoint(directory) as checkpoint:
        names = export(checkpoint, tmp_path / "out")
    files = serialize_tokenizer(tokenizer)
    assert {"config.json", "generation_config.json", "model.safetensors", *files} == set(names)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files} == files
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    loaded = model.state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in loaded.items())
    with torch.no_grad():  # not bitwise: on some processors sums depend on where in memory a matrix begins
        torch.testing.assert_close(model.eval()(input_ids=TOKENS).logits, logits)
    assert model.config.use_cache
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(TURN_END)]
    assert model.config.eos_token_id == model.generation_config.eos_token_id == ends
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = [t.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) for t in (exported, tokenizer)]
    assert texts[0] == texts[1]


def test_a_file_at_a_time_is_in_memory(saved, tmp_path, monkeypatch):
    directory, *_ = saved
    alive, peaks, make = {}, [], module._read

    def count(*arguments):
        made = make(*arguments)
        alive[id(made)] = made.nbytes
        weakref.finalize(made, alive.pop, id(made))
        peaks.append(sum(alive.values()))
        return made

    monkeypatch.setattr(module, "_read", count)
    monkeypatch.setattr(module, "FILE_BYTES", 6000)
    with Checkpoint(directory) as checkpoint:
        names = export(checkpoint, tmp_path / "out")
        model = [record for record in checkpoint.manifest.tensors.values() if record.kind != "state"]
        largest = max(4 * torch.Size(record.shape).numel() for record in model)
    assert len(names) > 5 and len(peaks) >= len(model), "an expert is a tensor of its own"
    assert max(peaks) <= max(6000, largest), "a larger tensor is a file of its own"


def test_a_full_disk_is_reported_in_one_line(saved, tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(module, "save_file", full)
    with Checkpoint(saved[0]) as checkpoint, pytest.raises(UserError, match=r"got .*No space left on device"):
        export(checkpoint, tmp_path / "out")
    assert not list(tmp_path.glob(".out*")) and not (tmp_path / "out").exists()


def test_nothing_is_left_of_an_export_that_failed(saved, tmp_path):
    directory = shutil.copytree(saved[0], tmp_path / saved[0].name)
    shard = next(directory.glob("*rank_00001.h5"))
    flip(shard, shard.stat().st_size // 2)
    with Checkpoint(directory) as checkpoint, pytest.raises(UserError, match=r"rank_00001\.h5 is damaged"):
        export(checkpoint, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [directory]


def test_it_is_on_the_disk_before_it_has_its_name(saved, tmp_path, monkeypatch):
    flushed, fsync = set(), os.fsync

    def watch(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not (tmp_path / "out").exists():
            flushed.add(path.name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    with Checkpoint(saved[0]) as checkpoint:
        names = export(checkpoint, tmp_path / "out")
    assert flushed >= {*names, "model"}

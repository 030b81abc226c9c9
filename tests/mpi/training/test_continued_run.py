"""Runs that begin with the model of another run, and settings that are resolved at the start."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from small_training import configure, save_model, train_to_the_end

from odc_mpi import api, hub
from odc_mpi.checkpoint.commands import open_newest_checkpoint
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.errors import AllRanksUserError
from odc_mpi.models.configuration import first_difference
from odc_mpi.models.load import load_model
from odc_mpi.training.start.resolved_settings import resolve_settings
from odc_mpi.training.train import train

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.sizes(2),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # of peft itself
]
LORA = {"lora.r": 4, "lora.alpha": 16}
EPSILON = {"model.config.rms_norm_eps": 1e-3}


@pytest.fixture(scope="module")
def directory(world, shared_dir):
    return save_model(world, shared_dir / "published", num_hidden_layers=1)


@pytest.fixture(scope="module")
def other_data(world, shared_dir):
    path = shared_dir / "other.h5"
    if world.rank == 0:
        with DatasetWriter(path, vocab_size=61, tokenizer="none", source="other") as writer:
            for i in range(20):
                writer.append(np.arange(i, i + 9, dtype=np.uint32), np.ones(9, bool))
    world.gather_objects(None)
    return path


def values(path):
    meta_model = load_model(path)
    named = dict(meta_model.module.named_parameters())
    return {name: meta_model.weights.read(name, 0, p.numel()).float() for name, p in named.items()}


@pytest.mark.parametrize("adapters", [{}, LORA], ids=["full", "adapters"])
def test_a_run_goes_on_with_the_model_of_another(
    world, dataset_path, other_data, directory, base, adapters, monkeypatch, capsys
):
    """On other data. With a learning rate of 0 the second run has exactly the parameters of a checkpoint of the first.

    The first run also prints what it has chosen.
    """
    common = {"run.checkpoint_every": 2, "run.steps": 2}
    monkeypatch.setattr(api, "gpu_uuid", lambda host_rank: None)
    auto = {"run.device": "auto", "model.param_dtype": "auto"}
    first = configure(dataset_path, **common, **adapters, **auto, **{"model.path": directory, "run.dir": base / "a"})
    train_to_the_end(first, world)
    if world.rank == 0:
        printed = capsys.readouterr().out
        assert ", float32 (auto), cpu (auto: torch finds no GPU)\n" in printed
        assert re.search(r"gradients: .* MiB per rank \(auto\)\n", printed)
    checkpoint = open_newest_checkpoint(base / "a").directory
    assert checkpoint.parent == base / "a" / "checkpoints"
    still = {"optim.learning_rate": 0, "optim.weight_decay": 0, "run.seed": 5, "run.dir": base / "b"}
    second = configure(other_data, **common, **still, **{"model.path": checkpoint})
    train_to_the_end(second, world)
    before, after = values(base / "a"), values(base / "b")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert any(value.abs().sum() > 0 for name, value in after.items() if not adapters or "lora_B" in name)
    with open_newest_checkpoint(base / "a") as a, open_newest_checkpoint(base / "b") as b:
        assert b.manifest.metadata["config"]["model"]["path"] == str(a.directory)
        one, other = a.manifest.metadata, b.manifest.metadata
        assert [one.get(key) == other.get(key) for key in ("base", "adapter")] == [True, True]
        assert first_difference(one, other["transformers_config"]) is None
    # And it resumes, over the same base.
    train_to_the_end(configure(other_data, **common | still | {"run.steps": 3, "model.path": base / "a"}), world)
    assert json.loads((base / "b" / "summary.json").read_text())["steps"] == 3
    if adapters:
        for wrong, words in (({"lora.r": 2}, r"lora.r: expected 4, as in model.path"), (EPSILON, "model.config: ")):
            with pytest.raises(AllRanksUserError, match=words):
                train(configure(dataset_path, **still | wrong | {"model.path": base / "a"}), world)
    else:
        with pytest.raises(AllRanksUserError, match=r"lora.r: .* odc-mpi export .* --out DIR"):
            train(configure(dataset_path, **still | LORA | {"model.path": base / "a"}), world)


def test_ranks_with_different_data_are_reported(world, dataset_path, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # of each rank
    names = {"vocab_size": 61, "tokenizer": "none", "source": "other"}
    with Dataset(dataset_path) as whole, DatasetWriter("data.h5", **names) as writer:
        for tokens, mask in itertools.islice(whole, len(whole) - world.rank):
            writer.append(tokens.astype(np.uint32), mask)
    differing = r"data.path: data.h5 differs between ranks: rank 1 has [0-9a-f]+, rank 0 has [0-9a-f]+"
    with pytest.raises(AllRanksUserError, match=differing):
        train(configure("data.h5", **{"run.dir": base}), world)


@pytest.mark.parametrize("adapters", [{}, LORA], ids=["full", "adapters"])
def test_other_settings_of_the_model_are_recorded_and_required(world, dataset_path, directory, base, adapters):
    given = {"model.path": directory, "run.dir": base, "run.checkpoint_every": 2, "run.steps": 2, **adapters}
    train_to_the_end(configure(dataset_path, **given, **EPSILON), world)
    assert load_model(base).module.config.rms_norm_eps == 1e-3
    given["run.steps"] = 3
    with pytest.raises(AllRanksUserError, match=r"of another model: rms_norm_eps is 0.001 there, 1e-06 in this run"):
        train(configure(dataset_path, **given), world)
    train_to_the_end(configure(dataset_path, **given, **EPSILON), world)


def test_device_and_dtype_are_chosen_alike_on_all_ranks(world, dataset_path, monkeypatch):
    auto = configure(dataset_path, **{"run.device": "auto", "model.param_dtype": "auto"})
    for uuids, device, reason in (
        ([None, None], "cpu", "torch finds no GPU"),
        (["a", "b"], "cuda", "each rank has a GPU"),
        (["a", "a"], "cpu", "2 ranks share a GPU"),
        (["a", None], "cpu", "rank 1 has no GPU"),
    ):
        monkeypatch.setattr(api, "gpu_uuid", lambda host_rank, uuids=uuids: uuids[world.rank])
        config, notes = resolve_settings(auto, world)
        dtype = "bfloat16" if device == "cuda" else "float32"
        assert (config.run.device, config.model.param_dtype) == (device, dtype)
        assert notes == {"run.device": f" (auto: {reason})", "model.param_dtype": " (auto)"}
    config, notes = resolve_settings(configure(dataset_path, **{"model.param_dtype": "bfloat16"}), world)
    assert (config.run.device, config.model.param_dtype, notes) == ("cpu", "bfloat16", {})


def test_a_node_downloads_a_model_once(world, dataset_path, base, monkeypatch):
    """The program in place of the Hub's adds a line per download."""
    snapshot = base / "models--Owner--Name" / "snapshots" / ("0123456789" * 4)
    program = f"""
import json, pathlib, sys
asked = json.loads(sys.argv[1])
assert asked["repo_id"] == "Owner/Name" and not any("bin" in each or "py" in each for each in asked["allow_patterns"])
snapshot = pathlib.Path({str(snapshot)!r})
with open({str(base)!r} + "-downloads", "a") as log:
    log.write("one\\n")
snapshot.mkdir(parents=True)
(snapshot.parents[1] / "refs").mkdir()
(snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
for name in ("config.json", "model.safetensors"):
    (snapshot / name).write_text("{{}}")
"""
    monkeypatch.setattr(hub, "_PROGRAM", program)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(base))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    config, _ = resolve_settings(configure(dataset_path, **{"model.path": "Owner/Name"}), world)
    assert config.model.path == str(snapshot)
    assert Path(f"{base}-downloads").read_text() == "one\n"

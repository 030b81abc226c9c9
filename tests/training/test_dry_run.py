"""`odc-mpi train --dry-run`: estimates agree with what is allocated and measured, and nothing is written."""

import json
import re

import numpy as np
import pytest
import torch
import yaml
from mpi_launch import ROOT
from peak_memory import estimated_and_measured
from small_run import MODEL, write_config, write_sequences
from tiny_qwen2 import QWEN2
from user_errors import refused, user_error

from odc_mpi.cli import main as cli
from odc_mpi.models.build import from_config
from odc_mpi.training import settings as configuration
from odc_mpi.training.inputs import _with_adapters
from odc_mpi.training.start.memory_estimate import estimate_memory, frozen_bytes


def sizes(model, *overrides, ranks=1, per_node=None, lengths=(512,)):
    given = [f"--model.config.{key}={value}" for key, value in model.items()]
    config = configuration.load(
        None, [*given, "--data.path=x.h5", "--run.device=cpu", "--model.param_dtype=float32", *overrides]
    )
    parts = estimate_memory(config, from_config(model, 0), ranks, per_node or ranks, lengths)
    return {part.name: part.num_bytes for part in parts}, {part.name for part in parts if part.on_gpu}


def files(directory):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


def test_a_dry_run_prints_memory_and_steps_and_writes_nothing(tmp_path, capsys, monkeypatch):
    data = write_sequences(tmp_path / "data.h5", map(np.arange, (5, 20, 30)))
    path = write_config(data, tmp_path)
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path)
    assert cli.main(["train", "--config", str(path), "--dry-run", "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"steps   8, 8.00 epochs\ntokens  about 440, ", out) and "of other ranks, mapped" in out
    assert re.search(r"\n  total +[\d,]+ MiB\n", out) and "first microbatch: not decoded: " in out
    assert files(tmp_path) == before
    assert cli.main(["train", "--config", str(path), "--dry-run", "--run.num_train_epochs", "4"]) == 0
    assert "of a microbatch of 55 tokens" in capsys.readouterr().out
    frozen = ("--lora.r=2", "--lora.target_modules=[q_proj]", "--lora.layers_to_transform=[1]")
    assert cli.main(["train", "--config", str(path), "--dry-run", "--model.cache_frozen_prefix", *frozen]) == 0
    assert "\nprefix  layers 0 to 0 of 2 are computed once: 0.0 MiB for 55 tokens in " in capsys.readouterr().out
    assert files(tmp_path) == before
    user_error(capsys, "train", "--config", path, "--ranks", 2, words="--ranks: only for --dry-run")
    assert cli.main(["train", "--config", str(path), "--dry-run", "--data.max_tokens_per_microbatch", "9"]) == 2


def test_the_first_microbatch_is_decoded_with_its_mask(tmp_path, capsys):
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "two plus two is ", "completion": "four"}))
    prepared = tmp_path / "pairs.h5"
    assert cli.main(["prepare", str(tmp_path / "pairs.jsonl"), "--out", str(prepared), "--vocab-size", "300"]) == 0
    path = write_config(prepared, tmp_path)
    assert cli.main(["train", "--config", str(path), "--dry-run", "--model.config.vocab_size", "304"]) == 0
    assert re.search(
        r"\nsequence 0: \d+ tokens, (\d+) with loss\ntwo plus two is \[\[four<\S+\]\]\n", capsys.readouterr().out
    )


def test_shards_and_states_are_divided_among_ranks_and_caches_are_bounded_by_their_settings():
    whole, _ = sizes(MODEL)
    numel = sum(p.numel() for p in from_config(MODEL, 0).module.parameters())
    assert whole["parameters"] == pytest.approx(4 * numel, rel=0.02)
    assert (whole["gradients"], whole["optimizer"]) == (whole["parameters"], 2 * whole["parameters"])
    half, _ = sizes(MODEL, ranks=2)
    assert half["optimizer"] == pytest.approx(whole["optimizer"] / 2, rel=0.02)
    assert half["gradient cache"] == pytest.approx(4 * numel, rel=0.02) and "gradient cache" not in whole
    uncached, _ = sizes(MODEL, "--comm.gradient_cache_bytes=0", ranks=2)
    assert "gradient cache" not in uncached and uncached["gradients in transit"] > half["gradients in transit"]
    multi_node, _ = sizes(MODEL, ranks=2, per_node=1)
    assert "of other ranks, mapped" not in multi_node and multi_node["parameter cache"] > 0
    assert "copies in memory_dir" not in half
    for per_node, num_copies in ((2, 1), (1, 2)):
        copied, _ = sizes(MODEL, "--run.memory_every=1", ranks=2, per_node=per_node)
        state = 3 * half["parameters"]
        assert copied["copy to write there"] == state
        assert 1 < copied["copies in memory_dir"] / (2 * num_copies * state) < 1.5, "files have a header per tensor"
    narrow, on_gpu = sizes(MODEL, "--model.param_dtype=bfloat16", "--run.device=cuda", "--optim.device=cuda", ranks=2)
    assert narrow["fp32 masters"] == 2 * narrow["parameters"] == half["parameters"]
    assert {"optimizer", "fp32 masters", "activations", "fetched units", "parameters", "gradients"} < on_gpu
    _, on_gpu = sizes(MODEL, "--run.device=cuda", "--optim.device=cuda", "--comm.window_device=cpu", ranks=2)
    assert "optimizer" in on_gpu and not {"parameters", "gradients"} & on_gpu
    small, _ = sizes(MODEL, "--model.gradient_checkpointing=true")
    assert small["activations"] < whole["activations"] * 0.7
    eager, _ = sizes(MODEL, "--model.attn_implementation=eager")
    assert eager["activations"] > whole["activations"] + 2 * 4 * 512 * 512 * 8


def test_ranks_of_a_node_among_several_share_one_copy_of_the_model():
    numel = sum(p.numel() for p in from_config(MODEL, 0).module.parameters())
    shared, _ = sizes(MODEL, ranks=8, per_node=4)
    assert shared["node cache"] == pytest.approx(4 * numel / 4, rel=0.02)
    assert not {"fetched units", "parameter cache", "of other ranks, mapped"} & shared.keys()
    each = [sizes(MODEL, "--comm.node_cache=off", ranks=8, per_node=4)[0]]
    each += [sizes(MODEL, "--comm.zero_copy=off", ranks=8, per_node=4)[0], sizes(MODEL, ranks=8, per_node=1)[0]]
    each += [sizes(MODEL, f"--comm.parameter_cache_bytes={numel - 1000}", ranks=8, per_node=4)[0]]
    for parts in each:
        assert "node cache" not in parts and parts["parameter cache"] > 0 and parts["fetched units"] > 0
    assert "node cache" not in sizes(MODEL, ranks=8)[0]
    on_gpus, on_gpu = sizes(MODEL, "--run.device=cuda", "--comm.parameter_cache_bytes=0", ranks=8, per_node=4)
    assert on_gpus["node cache"] == shared["node cache"] and "node cache" not in on_gpu and "fetched units" in on_gpu


def test_islands_hold_all_parameters_each_and_share_the_optimizer_with_the_others():
    flat = sizes(MODEL, ranks=8, per_node=4)[0]
    for by in ("node", "4"):
        islands = sizes(MODEL, f"--islands.by={by}", ranks=8, per_node=4)[0]
        assert islands["parameters"] == 2 * flat["parameters"] and islands["optimizer"] == flat["optimizer"]
        assert islands["gradients"] == 3 * flat["gradients"]
        assert islands["of other ranks, mapped"] == pytest.approx(3 * islands["parameters"], rel=0.05)
        assert "node cache" not in islands
    outer = sizes(MODEL, "--islands.by=4", "--islands.mode=outer", ranks=8, per_node=4)[0]
    for name in ("parameters", "optimizer", "gradients"):
        assert outer[name] == pytest.approx(2 * flat[name], rel=0.02)  # padding
    # Outer parameters and momentum, their copies to save, and while merging 4 arrays and 5 messages.
    assert outer["merges of islands"] == (4 + 4 + 5) * outer["gradients"]
    uneven = sizes(MODEL, ranks=3, per_node=2)[0]
    assert "of other ranks, mapped" not in uneven  # on two nodes
    refused("islands.by: expected node or a divisor of 8...got 3", sizes, MODEL, "--islands.by=3", ranks=8, per_node=4)


def test_the_activations_are_those_that_autograd_saves():
    module = from_config(MODEL, 0).module.to_empty(device="cpu")
    parameters = {p.data_ptr() for p in module.parameters()}
    saved = {}
    tokens, bounds = torch.zeros(1, 512, dtype=torch.int64), torch.tensor([0, 512], dtype=torch.int32)

    def keep(tensor):
        if tensor.data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(
            tokens, position_ids=torch.arange(512)[None], cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, use_cache=False
        )
    actual = sum(storage.nbytes() for storage in saved.values())
    assert sizes(MODEL)[0]["activations"] == pytest.approx(actual, rel=0.15)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_total_is_the_measured_peak_within_a_fifth(tmp_path):
    data = write_sequences(tmp_path / "data.h5", (np.arange(1000) % 60 for _ in range(4)))
    settings = yaml.safe_load((ROOT / "jobs" / "quickstart.yaml").read_text())
    settings["data"]["path"] = str(data)
    settings["data"]["minibatch_sequences"] = 4
    settings["run"] = {"steps": 2, "dir": str(tmp_path / "run"), "threads": 1}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    total, peak = estimated_and_measured(tmp_path / "config.yaml")
    assert total == pytest.approx(peak, rel=0.2)


def test_each_node_holds_the_frozen_base():
    """Four ranks on two nodes: half of the base on each rank, and the other half mapped, instead of a quarter."""
    model = {**QWEN2, "tie_word_embeddings": False}
    found = {}
    for scope in ("node", "world"):
        options = (f"--comm.frozen_scope={scope}", "--lora.r=2", "--comm.node_cache=off")
        given = [f"--model.config.{key}={value}" for key, value in model.items()]
        config = configuration.load(
            None, [*given, "--data.path=x.h5", "--run.device=cpu", "--model.param_dtype=float32", *options]
        )
        meta_model = _with_adapters(from_config(model, 0), config)
        found[scope] = {part.name: part.num_bytes for part in estimate_memory(config, meta_model, 4, 2, [16])}
    base = frozen_bytes(meta_model)
    assert found["node"]["frozen, over the node"] == pytest.approx(base / 2, rel=0.01)
    assert found["node"]["of other ranks, mapped"] == pytest.approx(base / 2, rel=0.01)
    assert found["world"]["parameters"] - found["node"]["parameters"] == pytest.approx(base / 4, rel=0.05)
    assert "frozen, over the node" not in found["world"]

"""Adapters as a person trains and exports them, over a base that was drawn at random; more in test_post_training."""

import json

import h5py
import pytest
from damage import flip
from mpi_launch import odc_mpi

from odc_mpi.cli.main import main

LORA = ("--lora.r", "2", "--lora.target_modules", "all-linear")


@pytest.mark.quick
@pytest.mark.timeout(300)
def test_a_run_with_adapters(config, data, tmp_path, capsys):
    run = tmp_path / "run"
    evaluated = ("--data.eval_path", data, "--data.eval_sequences", 4, "--run.eval_every", 2, "--run.keep_best", "true")
    often = ("--run.checkpoint_every", "2", "--run.keep_checkpoints", "1")
    done = odc_mpi(2, "train", "--config", config, *LORA, *evaluated, *often, "--run.steps", "4")
    assert done.code == 0, done.err
    summary = json.loads((run / "summary.json").read_text())
    trained, total = summary["num_trained_parameters"], summary["num_parameters"]
    assert 0 < trained < total / 4
    assert f"{trained:,} of {total:,} parameters trainable ({trained / total:.1%}), LoRA r=2" in done.out
    assert summary["best_checkpoint"] is not None and "eval_loss" in summary

    assert main(["checkpoint", "list", str(run)]) == main(["checkpoint", "verify", str(run)]) == 0
    assert "step 4, " in (listed := capsys.readouterr().out) and "step_00000004  intact" in listed
    assert main(["checkpoint", "show", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "LoRA adapter r=2 alpha=8, base: randomly initialized with seed 0" in lines
    row = next(line for line in lines if "exp_avg/" in line and "layers.1.mlp.up_proj.lora_A" in line)
    assert "2x32" in row and "float32" in row and float(row.split()[-1]) > 0
    for out, more, files in (
        ("adapters", (), {"adapter_config.json", "adapter_model.safetensors"}),
        ("merged", ("--merge",), {"config.json", "generation_config.json", "model.safetensors"}),
    ):
        assert main(["export", str(run), "--out", str(tmp_path / out), *more]) == 0
        assert {path.name for path in (tmp_path / out).iterdir()} == files
    assert main(["export", str(run), "--out", str(tmp_path / "merged")]) == 2
    assert "expected a new directory as --out" in capsys.readouterr().err

    shard = run / "checkpoints" / "step_00000004" / "step_00000004_rank_00001.h5"
    with h5py.File(shard) as file:
        name = next(iter(file["optimizer/exp_avg"]))
        flip(shard, file[f"optimizer/exp_avg/{name}"].id.get_offset())
    assert main(["checkpoint", "verify", str(run)]) == 1
    damaged = capsys.readouterr().out
    assert shard.name in damaged and f"optimizer/exp_avg/{name}" in damaged
    assert main(["checkpoint", "list", str(run / "nowhere")]) == 2

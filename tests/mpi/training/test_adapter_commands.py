"""Adapters by commands, from training to damage; over the base of a directory: test_post_training."""

import json

import h5py
import pytest
from damage import flip
from small_run import write_config, write_data
from small_training import on_first_rank

from odc_mpi.cli.main import main

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]

LORA = ("--lora.r", "2", "--lora.target_modules", "all-linear")
OFTEN = ("--run.steps", "4", "--run.checkpoint_every", "2", "--run.keep_checkpoints", "1")
EVALUATED = ("--data.eval_sequences", "4", "--run.eval_every", "2", "--run.keep_best", "true")


def test_a_run_with_adapters(world, base, capsys):
    if world.rank == 0:
        base.mkdir()
        write_config(write_data(base / "small.h5"), base)
    world.gather_objects(None)
    words = ["--config", str(base / "config.yaml"), "--data.eval_path", str(base / "small.h5")]
    assert main(["train", *words, *LORA, *OFTEN, *EVALUATED]) == 0
    on_first_rank(world, lambda: check_commands(base, capsys))


def check_commands(base, capsys):
    run, trained_out = base / "run", capsys.readouterr().out
    summary = json.loads((run / "summary.json").read_text())
    trained, total = summary["num_trained_parameters"], summary["num_parameters"]
    assert 0 < trained < total / 4
    assert f"{trained:,} of {total:,} parameters trainable ({trained / total:.1%}), LoRA r=2" in trained_out
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
        assert main(["export", str(run), "--out", str(base / out), *more]) == 0
        assert {path.name for path in (base / out).iterdir()} == files
    assert main(["export", str(run), "--out", str(base / "merged")]) == 2
    assert "expected a new directory as --out" in capsys.readouterr().err

    shard = run / "checkpoints" / "step_00000004" / "step_00000004_rank_00001.h5"
    with h5py.File(shard) as file:
        name = next(iter(file["optimizer/exp_avg"]))
        flip(shard, file[f"optimizer/exp_avg/{name}"].id.get_offset())
    assert main(["checkpoint", "verify", str(run)]) == 1
    damaged = capsys.readouterr().out
    assert shard.name in damaged and f"optimizer/exp_avg/{name}" in damaged
    assert main(["checkpoint", "list", str(run / "nowhere")]) == 2

"""Loading of models from a Hugging Face directory, a peft directory, a run or a checkpoint, on any number of ranks.

Parameters remain on the meta device. Each rank reads its slices of the parameters when the model is sharded:

    meta_model = load_model(path, world.rank, world.size)
    model = shard_model(meta_model.module, world, weights=meta_model.weights)
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from odc_mpi.checkpoint.commands import open_newest_checkpoint
from odc_mpi.checkpoint.groups import checkpoint_directories
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.side_files import read_tokenizer_files
from odc_mpi.checkpoint.state import CheckpointWeights, restore_buffers
from odc_mpi.data.tokenizer import load_files
from odc_mpi.errors import UserError
from odc_mpi.models import build
from odc_mpi.models.adapters.add import add_adapters
from odc_mpi.models.adapters.read import from_peft_directory, is_peft_directory, load_base
from odc_mpi.models.heads import CAUSAL_LM, REWARD, Task, prediction_task


def load_model(
    path: Path, rank: int = 0, size: int = 1, attn_implementation: str | None = None, base: Path | None = None
) -> build.MetaModel:
    """Build a model on the meta device, together with a source of its weights.

    Args:
        path: Hugging Face directory, peft directory, checkpoint, or run, whose newest complete checkpoint is used.
        rank, size: This rank and the number of ranks. Each rank verifies part of an adapter checkpoint's base model.
        attn_implementation: Attention in packed sequences: "sdpa" or "eager". The default is the run's, or "sdpa".
        base: Hugging Face directory of the adapters' base model. None means the directory recorded with the adapters.

    Returns:
        The model. Adapters are float32. Other parameters have the run's `model.param_dtype` (checkpoint), the
        `stored_dtype` (peft directory), or float32. A checkpoint stays open until `weights` is garbage-collected.

    Raises:
        UserError: `path` has no model, a file is damaged, or the base is missing, wrong, or given without adapters.
    """
    if is_peft_directory(path):  # first, as in transformers, if the directory also has config.json
        return from_peft_directory(path, attn_implementation or "sdpa", base)
    if build.is_model_directory(path):
        _refuse_base(path, base)
        return build.from_directory(path, attn_implementation or "sdpa")
    return load_checkpoint(open_newest_checkpoint(path), rank, size, attn_implementation, base)


def load_checkpoint(
    checkpoint: Checkpoint,
    rank: int = 0,
    size: int = 1,
    attn_implementation: str | None = None,
    base: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    task: Task | None = None,
    seed: int = 0,
) -> build.MetaModel:
    """Build the model in a checkpoint. For arguments and errors that are not described here, see `load_model`.

    `overrides` contains transformers settings to replace. If `task` differs from the checkpoint's task (the default),
    the model gets a new head, randomly initialized with `seed`. These three arguments apply only to full models.
    """
    metadata = checkpoint.manifest.metadata
    if "transformers_config" not in metadata:
        raise UserError(
            f"expected a checkpoint of a transformers model, got {checkpoint.directory} of another module: read its "
            "tensors from index.h5 with h5py (docs/checkpoints.md)"
        )
    model = metadata["config"]["model"]
    dtype = getattr(torch, model["param_dtype"])
    if "adapter" in metadata:
        meta_model = load_base(checkpoint, rank, size, attn_implementation, base)
        meta_model = add_adapters(meta_model, metadata["adapter"], metadata["config"]["run"]["seed"], dtype)
    else:
        _refuse_base(checkpoint.directory, base)
        meta_model = build.from_saved_config(
            metadata["transformers_config"],
            attn_implementation or model["attn_implementation"],
            overrides,
            task or saved_task(checkpoint),
            seed,
        )
        for parameter in meta_model.module.parameters():
            parameter.data = parameter.data.to(dtype)
    restore_buffers(meta_model.module, checkpoint)
    return replace(meta_model, weights=CheckpointWeights(checkpoint, meta_model.weights))


def find_checkpoint(path: Path) -> Checkpoint | None:
    """Open the newest complete checkpoint in `path`. Return None if `path` is a model directory or has no checkpoints.

    Raises `UserError` if all checkpoints are incomplete, or if the newest complete one is damaged.
    """
    if build.is_model_directory(path) or is_peft_directory(path):
        return None
    try:
        checkpoint_directories(path)
    except UserError:
        return None
    return open_newest_checkpoint(path)


def load_start(
    path: Path,
    rank: int,
    size: int,
    attn_implementation: str,
    overrides: Mapping[str, Any] | None,
    task: Task = CAUSAL_LM,
    seed: int = 0,
) -> build.MetaModel:
    """Build the model from which training starts.

    `path` (`model.path`) is a Hugging Face directory, a run, or a checkpoint. For an adapter checkpoint, the result is
    the base model, with the checkpoint in its attribute `checkpoint`. For the other arguments and errors, see
    `load_checkpoint`. Also raises `UserError` if the checkpoint is for a different task and contains adapters or a
    reward model.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        return build.from_directory(path, attn_implementation, overrides, task, seed)
    saved = saved_task(checkpoint)
    if saved is not task and saved is REWARD:
        raise UserError(f"model.path: expected a {task.description}, got {path} of a {saved.description}: change it")
    if saved is not task and "adapter" in checkpoint.manifest.metadata:
        raise UserError(
            f"model.path: expected a full model, got {path} with adapters of a {saved.description}: export it with "
            "odc-mpi export --merge, and set model.path to the exported directory"
        )
    if "adapter" in checkpoint.manifest.metadata:
        return replace(load_base(checkpoint, rank, size, attn_implementation), checkpoint=checkpoint)
    return load_checkpoint(checkpoint, rank, size, attn_implementation, overrides=overrides, task=task, seed=seed)


def saved_task(checkpoint: Checkpoint) -> Task:
    """Return the task of the model in a checkpoint."""
    return prediction_task(checkpoint.manifest.metadata["architectures"][0])


def load_run_tokenizer(checkpoint: Checkpoint, base: Path | None = None, remedy: str = "--tokenizer") -> Any:
    """Load the tokenizer of the run that saved a checkpoint. `base` replaces the `model.path` of the run.

    Raises `UserError` if the tokenizer files no longer exist. The message suggests the setting or option `remedy`.
    """
    config = checkpoint.manifest.metadata["config"]
    files = read_tokenizer_files(config, base)
    if not files:
        raise UserError(
            f"{checkpoint.directory}: expected a tokenizer in data.path, rl.tokenizer or model.path of the run, found "
            f"none: pass one with {remedy}"
        )
    return load_files(files, Path(config["data"]["path"]), remedy)


def _refuse_base(path: Path, base: Path | None) -> None:
    if base is not None:
        raise UserError(f"--base requires a LoRA adapter, {path} holds a full model: omit --base")

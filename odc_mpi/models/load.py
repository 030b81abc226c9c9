"""Loading of models from a Hugging Face directory, a peft directory, a run or a checkpoint, on any number of ranks.

Parameters remain on the meta device. Each rank reads its slices of the parameters when the model is sharded:

    meta_model = load_model(path, world.rank, world.size)
    model = shard_model(meta_model.module, world, weights=meta_model.weights)
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from odc_mpi.checkpoint.commands import open_newest_checkpoint
from odc_mpi.checkpoint.groups import checkpoint_directories
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.side_files import read_tokenizer_files
from odc_mpi.checkpoint.state import CheckpointWeights, restore_buffers
from odc_mpi.data.tokenizer import load_files
from odc_mpi.errors import UserError
from odc_mpi.hub import cached_model_path, download_hint
from odc_mpi.models import build
from odc_mpi.models.adapters import add_adapters
from odc_mpi.models.configuration import first_difference, full_configuration
from odc_mpi.models.heads import CAUSAL_LM, REWARD, Task, prediction_task, set_padding
from odc_mpi.models.peft_directory import from_peft_directory, is_peft_directory
from odc_mpi.models.weights.base_check import HashedWeights, check_base, describe_base


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


def load_base(
    checkpoint: Checkpoint,
    rank: int = 0,
    size: int = 1,
    attn_implementation: str | None = None,
    base: Path | None = None,
) -> build.MetaModel:
    """Build and verify the base model of an adapter checkpoint. For arguments and errors, see `load_model`."""
    record: Mapping[str, Any] = checkpoint.manifest.metadata["base"]
    attention = attn_implementation or checkpoint.manifest.metadata["config"]["model"]["attn_implementation"]
    task = saved_task(checkpoint)
    if record["path"] is None:
        if base is not None:
            raise UserError(
                f"--base: expected none, since the base of the LoRA adapter {checkpoint.directory} is "
                f"{describe_base(record)}, got {base}: omit --base"
            )
        meta_model = build.from_config(record["config"], record["seed"], attention, task)
    else:
        base_path = base or Path(cached_model_path(record["path"]))
        if not build.is_model_directory(base_path):
            raise UserError(
                f"{checkpoint.directory} is a LoRA adapter: expected its base model in {base_path}, found no "
                "config.json there: restore it, or pass its directory to odc-mpi export or generate with --base"
                f"{download_hint(str(base_path))}"
            )
        meta_model = build.from_directory(base_path, attention, record["config"], task, record["seed"])
        if task is REWARD:
            set_padding(meta_model.module.config, checkpoint.manifest.metadata["transformers_config"]["pad_token_id"])
        if difference := first_difference(checkpoint.manifest.metadata, full_configuration(meta_model.module)):
            key, theirs, ours = difference
            raise UserError(
                f"{checkpoint.directory} is a LoRA adapter: expected a base with {key} {theirs!r}, got {ours!r} in "
                f"{base_path}: restore its base there, or pass its directory with --base (odc-mpi export, generate)"
            )
    check_base(cast(HashedWeights, meta_model.weights), record, rank, size)
    return meta_model


def _refuse_base(path: Path, base: Path | None) -> None:
    if base is not None:
        raise UserError(f"--base requires a LoRA adapter, {path} holds a full model: omit --base")

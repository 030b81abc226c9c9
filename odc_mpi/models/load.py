"""From a directory on disk to a model: a Hugging Face directory, one of peft, a run, or one of its checkpoints.

Parameters stay on the meta device, and their values are read slice by slice, on any number of ranks:

    built = load_model(path, world.rank, world.size)
    model = shard_model(built.module, world, weights=built.weights)
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from odc_mpi.checkpoint.commands import open_newest
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.state import CheckpointWeights, restore_buffers
from odc_mpi.errors import UserError
from odc_mpi.models import build
from odc_mpi.models.adapters import add_adapters
from odc_mpi.models.configuration import first_difference, full_configuration
from odc_mpi.models.peft_directory import from_peft_directory, is_peft_directory
from odc_mpi.models.weights import HashedWeights, check_base, describe_base


def load_model(
    path: Path, rank: int = 0, size: int = 1, attn_implementation: str | None = None, base: Path | None = None
) -> build.MetaModel:
    """Build a model, without memory for its parameters.

    Args:
        path: A Hugging Face directory; or a directory of adapters as peft writes it; or a run directory, of which the
            newest checkpoint counts; or a checkpoint.
        rank: Of the base of adapters, each rank checks a share.
        size: Number of ranks that load the model.
        attn_implementation: Attention within each packed sequence, "sdpa" or "eager"; None: that of the run, else sdpa.
        base: Hugging Face directory of the base of adapters; None: where it was when they were saved.

    Returns:
        The model; of a checkpoint its parameters are of the types in which the run computed, adapters of peft are in
        float32 over a base of the type in its config.json. A checkpoint stays open as long as the weights.

    Raises:
        UserError: There is no model, it is damaged, or the base of its adapters is not there or another.
    """
    if is_peft_directory(path):  # first, as transformers does where both are there
        return from_peft_directory(path, attn_implementation or "sdpa", base)
    if build.is_model_directory(path):
        _refuse_base(path, base)
        return build.from_directory(path, attn_implementation or "sdpa")
    return load_checkpoint(open_newest(path), rank, size, attn_implementation, base)


def load_checkpoint(
    checkpoint: Checkpoint,
    rank: int = 0,
    size: int = 1,
    attn_implementation: str | None = None,
    base: Path | None = None,
) -> build.MetaModel:
    """Build the model of a checkpoint, as `load_model` does."""
    metadata = checkpoint.manifest.metadata
    if "transformers_config" not in metadata:
        raise UserError(f"{checkpoint.directory} is not of a transformers model: read it with h5py, see index.h5")
    model = metadata["config"]["model"]
    dtype = getattr(torch, model["param_dtype"])
    if "adapter" in metadata:
        meta_model = load_base(checkpoint, rank, size, attn_implementation, base)
        meta_model = add_adapters(meta_model, metadata["adapter"], metadata["config"]["run"]["seed"], dtype)
    else:
        _refuse_base(checkpoint.directory, base)
        meta_model = build.from_saved_config(
            metadata["transformers_config"], attn_implementation or model["attn_implementation"]
        )
        for parameter in meta_model.module.parameters():
            parameter.data = parameter.data.to(dtype)
    restore_buffers(meta_model.module, checkpoint)
    return replace(meta_model, weights=CheckpointWeights(checkpoint, meta_model.weights))


def load_base(
    checkpoint: Checkpoint,
    rank: int = 0,
    size: int = 1,
    attn_implementation: str | None = None,
    base: Path | None = None,
) -> build.MetaModel:
    """Build the base of a checkpoint of adapters, and check that it is that base.

    Args:
        checkpoint: Of adapters.
        rank: Each rank checks a share.
        size: Number of ranks that check the base.
        attn_implementation: As of `load_model`.
        base: Its Hugging Face directory; None: where it was when the checkpoint was saved.

    Raises:
        UserError: The base is not there, or another.
    """
    record: Mapping[str, Any] = checkpoint.manifest.metadata["base"]
    attention = attn_implementation or checkpoint.manifest.metadata["config"]["model"]["attn_implementation"]
    if record["path"] is None:
        if base is not None:
            raise UserError(
                f"--base: {checkpoint.directory} holds adapters over {describe_base(record)}, which no directory has: leave "
                "--base out"
            )
        meta_model = build.from_config(record["config"], record["seed"], attention)
    else:
        base_path = base or Path(record["path"])
        if not build.is_model_directory(base_path):
            raise UserError(
                f"{checkpoint.directory} holds adapters, expected their base in {base_path}, where there is no Hugging "
                "Face directory: say where it is with --base"
            )
        meta_model = build.from_directory(base_path, attention)
        _require_configuration(checkpoint, meta_model, base_path)
    check_base(cast(HashedWeights, meta_model.weights), record, rank, size)
    return meta_model


def _refuse_base(path: Path, base: Path | None) -> None:
    if base is not None:
        raise UserError(f"--base goes with adapters, {path} holds a whole model: leave --base out")


def _require_configuration(checkpoint: Checkpoint, meta_model: build.MetaModel, base_path: Path) -> None:
    if difference := first_difference(checkpoint.manifest.metadata, full_configuration(meta_model.module)):
        key, theirs, ours = difference
        raise UserError(
            f"{checkpoint.directory} holds adapters over a base with {key} {theirs!r}, got {ours!r} in {base_path}: name "
            "their base with --base"
        )

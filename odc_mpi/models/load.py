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

from odc_mpi.checkpoint.commands import newest
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.state import CheckpointWeights, restore_buffers
from odc_mpi.errors import UserError
from odc_mpi.models import build
from odc_mpi.models.adapter_directory import from_adapter_directory, is_adapter_directory
from odc_mpi.models.adapters import add_adapters
from odc_mpi.models.configuration import configuration_of, first_difference
from odc_mpi.models.weights import DigestedWeights, check_base, describe


def load_model(
    path: Path, rank: int = 0, size: int = 1, attn_implementation: str | None = None, base: Path | None = None
) -> build.BuiltModel:
    """Build a model, without memory for its parameters. Local.

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
    if is_adapter_directory(path):  # first, as transformers does where both are there
        return from_adapter_directory(path, attn_implementation or "sdpa", base)
    if build.is_model_directory(path):
        _refuse_base(path, base)
        return build.from_directory(path, attn_implementation or "sdpa")
    return load_checkpoint(newest(path), rank, size, attn_implementation, base)


def load_checkpoint(
    checkpoint: Checkpoint,
    rank: int = 0,
    size: int = 1,
    attn_implementation: str | None = None,
    base: Path | None = None,
) -> build.BuiltModel:
    """Build the model of a checkpoint, as `load_model` does. Local."""
    about = checkpoint.manifest.about
    if "transformers_config" not in about:
        raise UserError(f"{checkpoint.directory} is not of a transformers model: read it with h5py, see index.h5")
    model = about["config"]["model"]
    dtype = getattr(torch, model["param_dtype"])
    if "adapter" in about:
        built = load_base(checkpoint, rank, size, attn_implementation, base)
        built = add_adapters(built, about["adapter"], about["config"]["run"]["seed"], dtype)
    else:
        _refuse_base(checkpoint.directory, base)
        built = build.from_saved_config(
            about["transformers_config"], attn_implementation or model["attn_implementation"]
        )
        for parameter in built.module.parameters():
            parameter.data = parameter.data.to(dtype)
    restore_buffers(built.module, checkpoint)
    return replace(built, weights=CheckpointWeights(checkpoint, built.weights))


def load_base(
    checkpoint: Checkpoint,
    rank: int = 0,
    size: int = 1,
    attn_implementation: str | None = None,
    base: Path | None = None,
) -> build.BuiltModel:
    """Build the base of a checkpoint of adapters, and check that it is that base. Local.

    Args:
        checkpoint: Of adapters.
        rank: Each rank checks a share.
        size: Number of ranks that check the base.
        attn_implementation: As of `load_model`.
        base: Its Hugging Face directory; None: where it was when the checkpoint was saved.

    Raises:
        UserError: The base is not there, or another.
    """
    record: Mapping[str, Any] = checkpoint.manifest.about["base"]
    attention = attn_implementation or checkpoint.manifest.about["config"]["model"]["attn_implementation"]
    if record["path"] is None:
        if base is not None:
            raise UserError(
                f"--base: {checkpoint.directory} holds adapters over {describe(record)}, which no directory has: leave "
                "--base out"
            )
        built = build.from_config(record["config"], record["seed"], attention)
    else:
        place = base or Path(record["path"])
        if not build.is_model_directory(place):
            raise UserError(
                f"{checkpoint.directory} holds adapters, expected their base in {place}, where there is no Hugging "
                "Face directory: say where it is with --base"
            )
        built = build.from_directory(place, attention)
        _require_configuration(checkpoint, built, place)
    check_base(cast(DigestedWeights, built.weights), record, rank, size)
    return built


def _refuse_base(path: Path, base: Path | None) -> None:
    if base is not None:
        raise UserError(f"--base goes with adapters, {path} holds a whole model: leave --base out")


def _require_configuration(checkpoint: Checkpoint, built: build.BuiltModel, place: Path) -> None:
    if difference := first_difference(checkpoint.manifest.about, configuration_of(built.module)):
        key, theirs, ours = difference
        raise UserError(
            f"{checkpoint.directory} holds adapters over a base with {key} {theirs!r}, got {ours!r} in {place}: name "
            "their base with --base"
        )

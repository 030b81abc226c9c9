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
from odc_mpi.models.weights import DigestedWeights, check_base, describe


def load_model(path: Path, rank: int = 0, size: int = 1, attn_implementation: str | None = None) -> build.BuiltModel:
    """Build a model, without memory for its parameters. Local.

    Args:
        path: A Hugging Face directory; or a directory of adapters as peft writes it; or a run directory, of which the
            newest checkpoint counts; or a checkpoint.
        rank: Of the base of adapters, each rank checks a share.
        size: Number of ranks that load the model.
        attn_implementation: Attention within each packed sequence, "sdpa" or "eager"; None: that of the run, else sdpa.

    Returns:
        The model; of a checkpoint its parameters are of the types in which the run computed, adapters of peft are in
        float32 over a base of the type in its config.json. A checkpoint stays open as long as the weights.

    Raises:
        UserError: There is no model, it is damaged, or the base of its adapters is not there or another.
    """
    if is_adapter_directory(path):  # first, as transformers does where both are there
        return from_adapter_directory(path, attn_implementation or "sdpa")
    if build.is_model_directory(path):
        return build.from_directory(path, attn_implementation or "sdpa")
    return load_checkpoint(newest(path), rank, size, attn_implementation)


def load_checkpoint(
    checkpoint: Checkpoint, rank: int = 0, size: int = 1, attn_implementation: str | None = None
) -> build.BuiltModel:
    """Build the model of a checkpoint, as `load_model` does. Local."""
    about = checkpoint.manifest.about
    if "transformers_config" not in about:
        raise UserError(f"{checkpoint.directory} is not of a transformers model: read it with h5py, see index.h5")
    dtype = getattr(torch, about["config"]["model"]["param_dtype"])
    if "adapter" in about:
        built = load_base(checkpoint, rank, size, attn_implementation)
        built = add_adapters(built, about["adapter"], about["config"]["run"]["seed"], dtype)
    else:
        built = build.from_saved_config(about["transformers_config"], attn_implementation or _attention(checkpoint))
        for parameter in built.module.parameters():
            parameter.data = parameter.data.to(dtype)
    restore_buffers(built.module, checkpoint)
    return replace(built, weights=CheckpointWeights(checkpoint, built.weights))


def load_base(
    checkpoint: Checkpoint, rank: int = 0, size: int = 1, attn_implementation: str | None = None
) -> build.BuiltModel:
    """Build the base of a checkpoint of adapters, and check that it is that base. Local.

    Raises:
        UserError: The base is not there, or another.
    """
    record: Mapping[str, Any] = checkpoint.manifest.about["base"]
    attention = attn_implementation or _attention(checkpoint)
    if record["path"] is None:
        built = build.from_config(record["config"], record["seed"], attention)
    elif build.is_model_directory(Path(record["path"])):
        built = build.from_directory(Path(record["path"]), attention)
    else:
        raise UserError(
            f"{checkpoint.directory} holds adapters, expected their base {describe(record)} in this place: put it "
            "there, or start from the directory in which the run began"
        )
    check_base(cast(DigestedWeights, built.weights), record, rank, size)
    return built


def _attention(checkpoint: Checkpoint) -> str:
    """Return the run's model.attn_implementation; runs of before the setting had sdpa."""
    name: str = checkpoint.manifest.about["config"]["model"].get("attn_implementation", "sdpa")
    return name

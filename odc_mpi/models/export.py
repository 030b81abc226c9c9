"""Export of a checkpoint to a Hugging Face directory: a full model, adapters, or a base model with merged adapters.

Tensors of the checkpoint and the base model are read only when the output file that contains them is written. All
tensors of one output file are in memory at the same time. Optimizer state is not exported.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from typing_extensions import override

from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.side_files import GENERATION_CONFIG, SideFiles
from odc_mpi.checkpoint.state import MODEL, read_tensor
from odc_mpi.data.tokenizer import write_files
from odc_mpi.errors import UserError, one_line_message
from odc_mpi.files import set_default_mode, sync
from odc_mpi.models.adapters.read import load_base
from odc_mpi.models.adapters.write import MergedWeights, adapter_contents
from odc_mpi.models.heads import REWARD, prediction_task
from odc_mpi.models.load import load_checkpoint
from odc_mpi.models.quantization.quantize import dequantized_shapes
from odc_mpi.models.weights.conversion import PlacedTensor, published_tensors
from odc_mpi.shard.local_shards import WeightSource
from odc_mpi.shard.partition import replicated_persistent_tensors

#: Maximum size of the weights in one file, in bytes. A larger tensor gets a file of its own.
FILE_BYTES = 1 << 30


@dataclass(frozen=True)
class _Content:
    """Content of an exported directory, except side files.

    `tensors` maps exported names to tensors placed in those of `source`. `config` is the content of config.json, or
    None for adapters. `dtype` names the default torch dtype of floating-point parameters. `buffers` contains the
    tensors of `source` that keep their dtype, and `files` the contents of other JSON files, keyed by name.
    """

    tensors: Mapping[str, PlacedTensor]
    source: WeightSource
    config: dict[str, Any] | None
    dtype: str
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    files: Mapping[str, dict[str, Any]] = field(default_factory=dict)


def export(
    checkpoint: Checkpoint, out: Path, *, merge: bool = False, dtype: str | None = None, base: Path | None = None
) -> list[str]:
    """Export a checkpoint to a directory for transformers' or peft's `from_pretrained`. Return the names of its files.

    Args:
        out: Directory to create, which appears atomically with all of its files. It may already exist if it is empty.
        merge: True to export the base model of an adapter checkpoint (or its text model, if it is multimodal) with the
            adapters merged into the weights, instead of the adapters.
        dtype: Name of the torch dtype for floating-point parameters. The default is `model.param_dtype`, or float32
            for adapters. Buffers keep their dtype.
        base: Directory that now contains the base model of an adapter checkpoint, if not `model.path`. An exported
            adapter_config.json refers to it. If None, adapters can be exported even if the base model no longer exists.

    Raises:
        UserError: `out` exists and is not an empty directory, a file cannot be written, the checkpoint is damaged or
            cannot be exported, `merge` or `base` is given for a full model, or the base model is missing or wrong.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"expected a new directory as --out, got {str(out)!r}, which exists: change --out")
    has_adapters = "adapter" in checkpoint.manifest.metadata
    if not has_adapters and (option := "--merge" if merge else "--base" if base else None):
        raise UserError(f"{option} requires adapters, but {checkpoint.directory} is a full model: remove {option}")
    if has_adapters and not merge:
        tensors, files = adapter_contents(checkpoint, base)
        content = _Content(tensors, _CheckpointTensors(checkpoint), None, "float32", files=files)
    else:
        content = _model(checkpoint, base)
    dtype = dtype or content.dtype
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
            directory = Path(name, "model")
            directory.mkdir()
            _write_weights(content, directory, getattr(torch, dtype))
            recorded = checkpoint.manifest.metadata.get("base", {}).get("path")
            side_files = SideFiles(checkpoint.manifest.metadata["config"], base or (recorded and Path(recorded)))
            if content.config is not None:  # adapters use the special tokens of their base
                _write_model_config(directory, content.config | {"dtype": dtype}, side_files)
            for file, values in content.files.items():
                _write_json(directory / file, values)
            write_files(side_files.tokenizer, directory)
            names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))
            for file in (*names, "."):
                sync(directory / file)
            directory.replace(out)
        sync(out.parent)
    except (OSError, SafetensorError) as error:  # safetensors does not raise OSError for a full disk
        reason = getattr(error, "strerror", None) or one_line_message(error)
        raise UserError(
            f"expected --out in a folder that can be written, got {str(out)!r} ({reason}): change --out"
        ) from error
    return names


def _model(checkpoint: Checkpoint, base: Path | None) -> _Content:
    """Return a full or merged model as published tensors, with the names and shapes that `save_pretrained` writes."""
    metadata = checkpoint.manifest.metadata
    is_merged = "adapter" in metadata
    meta_model = load_base(checkpoint, base=base) if is_merged else load_checkpoint(checkpoint)
    module = meta_model.module
    buffers = dict(replicated_persistent_tensors(module))
    shapes = dequantized_shapes(module) | {name: tensor.shape for name, tensor in buffers.items()}
    tensors = published_tensors(module, shapes)
    source = MergedWeights(checkpoint, meta_model, buffers) if is_merged else _CheckpointTensors(checkpoint)
    config = {**metadata["transformers_config"], "architectures": metadata["architectures"]}
    config.pop("use_cache", None)  # training disables the KV cache, but generation needs it
    return _Content(tensors, source, config, metadata["config"]["model"]["param_dtype"], buffers)


class _CheckpointTensors(WeightSource):
    """Source of the model's tensors in a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    @override
    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return read_tensor(self._checkpoint, f"{MODEL}/{name}", start, stop)


def _write_weights(content: _Content, out: Path, dtype: torch.dtype) -> None:
    stem = "adapter_model" if content.config is None else "model"
    split = split_state_dict_into_shards_factory(
        {name: placed.numel() * _type(content, name, dtype).itemsize for name, placed in content.tensors.items()},
        get_storage_size=lambda num_bytes: num_bytes,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=FILE_BYTES,
    )
    for file, names in split.filename_to_tensors.items():
        # The tensors of a file are freed before those of the next one are read.
        save_file({name: _read(content, name, dtype) for name in names}, out / file, metadata={"format": "pt"})
        set_default_mode(out / file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(out / f"{stem}.safetensors.index.json", index)


def _type(content: _Content, name: str, dtype: torch.dtype) -> torch.dtype:
    buffer = content.buffers.get(content.tensors[name].regions[0].source)
    return dtype if buffer is None else buffer.dtype


def _read(content: _Content, name: str, dtype: torch.dtype) -> torch.Tensor:
    placed = content.tensors[name]
    values = placed.read_range(content.source, 0, placed.numel()).reshape(placed.shape)
    return values.to(_type(content, name, dtype)).contiguous()


def _write_model_config(out: Path, config: dict[str, Any], side_files: SideFiles) -> None:
    trained_with = {}
    if prediction_task(config["architectures"][0]) is REWARD:
        # A classifier scores the last token that is not padding, so it keeps the padding token of its training.
        trained_with = {"pad_token_id": config["pad_token_id"]}
    else:
        _write_json(out / GENERATION_CONFIG, side_files.generation_config(config))
    _write_json(out / "config.json", side_files.model_config(config) | trained_with)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

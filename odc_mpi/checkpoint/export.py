"""Export of a checkpoint to a Hugging Face directory with config.json, safetensors files and tokenizer files.

Only the weights of one safetensors file are in memory at a time. Optimizer state is not exported.
"""

import json
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file

from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.side_files import GENERATION_CONFIG, SideFiles
from odc_mpi.checkpoint.state import MODEL, read_tensor
from odc_mpi.data.tokenizer import write_files
from odc_mpi.errors import UserError, one_line_message
from odc_mpi.files import set_default_mode, sync_directory, sync_file

#: Maximum size of the weights in one file, in bytes. A larger tensor gets a file of its own.
FILE_BYTES = 1 << 30


class Exporter(ABC):
    """Source of the content of an exported directory: the configuration, and tensors that are read one by one."""

    #: Names of the weight files, without number and suffix, and of the configuration file.
    stem: str = "model"
    config_name: str = "config.json"
    #: Name of the default torch dtype for floating-point weights.
    dtype: str
    #: True for a language model, which needs generation_config.json.
    generates: bool = True

    @abstractmethod
    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        """Return the size in bytes of each tensor as `dtype`, keyed by exported name, in the order of writing."""

    @abstractmethod
    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read the tensor with the exported name `name`. Floating-point tensors are converted to `dtype`."""

    @abstractmethod
    def config(self, dtype: str) -> dict[str, Any]:
        """Return the content of the configuration file. `dtype` is the name of the exported torch dtype."""


def export(
    checkpoint: Checkpoint, out: Path, exporter: Exporter, dtype: str | None = None, base: Path | None = None
) -> list[str]:
    """Export a checkpoint as a directory for `from_pretrained` of transformers or peft. Return the names of its files.

    Args:
        out: Directory to create, which appears atomically with all of its files. It may already exist if it is empty.
        dtype: Name of the torch dtype for floating-point weights. By default, `exporter.dtype`.
        base: Directory that now contains the run's initial model, if not `model.path`. Generation settings are read
            from it, and so are tokenizer files if its tokenizer has a chat template or the run has no tokenizer.

    Raises:
        UserError: `out` exists and is not an empty directory, a file cannot be written, or the checkpoint is damaged or
            cannot be exported.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"expected a new directory as --out, got {str(out)!r}, which exists: change --out")
    dtype = dtype or exporter.dtype
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
            directory = Path(name, "model")
            directory.mkdir()
            _write_weights(exporter, directory, getattr(torch, dtype))
            _write_side_files(exporter, directory, dtype, SideFiles(checkpoint.manifest.metadata["config"], base))
            names = sorted(path.name for path in directory.iterdir())
            for file in names:
                sync_file(directory / file)
            sync_directory(directory)
            directory.replace(out)
        sync_directory(out.parent)
    except (OSError, SafetensorError) as error:  # safetensors does not raise OSError for a full disk
        reason = getattr(error, "strerror", None) or one_line_message(error)
        raise UserError(
            f"expected --out in a folder that can be written, got {str(out)!r} ({reason}): change --out"
        ) from error
    return names


def read_full_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Read a full tensor of the model in the dtype in which it was saved. Raise `UserError` if the data is damaged."""
    record = checkpoint.record(f"{MODEL}/{name}")
    return read_tensor(checkpoint, f"{MODEL}/{name}", 0, record.numel).reshape(record.shape)


def model_config(checkpoint: Checkpoint, dtype: str) -> dict[str, Any]:
    """Return the content of config.json for the model of a checkpoint, exported in the torch dtype named `dtype`."""
    metadata = checkpoint.manifest.metadata
    config = {**metadata["transformers_config"], "architectures": metadata["architectures"], "dtype": dtype}
    config.pop("use_cache", None)  # training disables the KV cache, but generation needs it
    return config


def _write_weights(exporter: Exporter, out: Path, dtype: torch.dtype) -> None:
    split = split_state_dict_into_shards_factory(
        exporter.sizes(dtype),
        get_storage_size=lambda num_bytes: num_bytes,
        filename_pattern=f"{exporter.stem}{{suffix}}.safetensors",
        max_shard_size=FILE_BYTES,
    )
    for file, names in split.filename_to_tensors.items():
        _write_file(exporter, out / file, names, dtype)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(out / f"{exporter.stem}.safetensors.index.json", index)


def _write_side_files(exporter: Exporter, out: Path, dtype: str, side_files: SideFiles) -> None:
    config = exporter.config(dtype)
    if exporter.config_name == Exporter.config_name:  # adapters use the special tokens of their base
        if exporter.generates:
            _write_json(out / GENERATION_CONFIG, side_files.generation_config(config))
        # A classifier keeps the padding token of its training, because it scores the last token that is not padding.
        trained_with = {} if exporter.generates else {"pad_token_id": config["pad_token_id"]}
        config = side_files.model_config(config) | trained_with
    _write_json(out / exporter.config_name, config)
    write_files(side_files.tokenizer, out)


def _write_file(exporter: Exporter, path: Path, names: list[str], dtype: torch.dtype) -> None:
    """Write the tensors of one file, which are freed on return."""
    tensors = {name: exporter.tensor(name, dtype).contiguous() for name in names}
    save_file(tensors, path, metadata={"format": "pt"})
    set_default_mode(path)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

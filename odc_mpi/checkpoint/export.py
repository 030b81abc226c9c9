"""From a checkpoint to a Hugging Face directory: config.json, safetensors, the tokenizer's files. One process.

The weights of one file at a time are in memory, never the whole model. Optimizer state is not exported.
"""

import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from odc_mpi.checkpoint.manifest import TensorRecord
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.state import MODEL, read_tensor
from odc_mpi.data.tokenizer import tokenizer_files, write_files
from odc_mpi.errors import UserError, one_line_message
from odc_mpi.files import sync_directory, sync_file

#: Bytes of weights in one file; a larger tensor has a file of its own.
FILE_BYTES = 1 << 30


class Exporter(ABC):
    """What is written: tensors by name, each read when its file is written, and a configuration.

    Attributes:
        stem: Name of the file of weights, without its suffix.
        config_name: Name of the file of the configuration.
        dtype: Type of floating-point weights, as torch names it, unless the user wants another.
    """

    stem: str = "model"
    config_name: str = "config.json"
    dtype: str

    @abstractmethod
    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        """Return the bytes of each tensor in the files, by its name there, in the order of the files."""

    @abstractmethod
    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read a tensor, and make it of this type if it is floating-point."""

    @abstractmethod
    def config(self, dtype: str) -> dict[str, Any]:
        """Return the content of the configuration."""


class WholeModelExporter(Exporter):
    """A model that a checkpoint holds whole.

    Raises:
        UserError: The checkpoint is of another kind of model, or of adapters alone.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        metadata = checkpoint.manifest.metadata
        if "transformers_config" not in metadata:
            raise UserError(f"{checkpoint.directory} is not of a transformers model: read it with h5py, see index.h5")
        if "base" in metadata:
            raise UserError(f"{checkpoint.directory} holds adapters alone: export them, or the model with --merge")
        self._checkpoint = checkpoint
        self.dtype = metadata["config"]["model"]["param_dtype"]

    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        """See `Exporter`. A tied parameter is there once, as transformers expects it."""
        return {
            path.removeprefix(f"{MODEL}/"): record.numel * _export_dtype(record, dtype).itemsize
            for path, record in self._checkpoint.manifest.tensors.items()
            if record.kind != "state"
        }

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See `Exporter`."""
        whole = read_whole(self._checkpoint, name)
        return whole.to(_export_dtype(self._checkpoint.record(f"{MODEL}/{name}"), dtype))

    def config(self, dtype: str) -> dict[str, Any]:
        """See `Exporter`."""
        return model_config(self._checkpoint, dtype)


def export(
    checkpoint: Checkpoint,
    out: Path,
    dtype: str | None = None,
    exporter: Exporter | None = None,
    base: Path | None = None,
) -> list[str]:
    """Write a model such that `AutoModelForCausalLM.from_pretrained(out)` loads it.

    Args:
        checkpoint: A checkpoint of `odc-mpi train`.
        out: A directory that does not exist or is empty; it appears complete or not at all.
        dtype: Type of floating-point weights, as torch names it; by default that of `exporter`.
        exporter: What of the checkpoint is written; by default the model that it holds.
        base: Where the model is now that the run began with, for its tokenizer; None: where it was.

    Returns:
        The names of the files.

    Raises:
        UserError: The checkpoint is damaged or of another kind of model, or `out` cannot be written.
    """
    exporter = exporter or WholeModelExporter(checkpoint)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"expected OUT to be a new directory, got {out}, which is there: choose another")
    dtype = dtype or exporter.dtype
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
            directory = Path(name, "model")
            directory.mkdir()
            _write_weights(exporter, directory, getattr(torch, dtype))
            _write_json(directory / exporter.config_name, exporter.config(dtype))
            write_files(read_tokenizer_files(checkpoint.manifest.metadata["config"], base), directory)
            names = sorted(path.name for path in directory.iterdir())
            for path in directory.iterdir():
                sync_file(path)
            sync_directory(directory)
            directory.replace(out)
        sync_directory(out.parent)
    except (OSError, SafetensorError) as error:  # safetensors tells of a full disk in its own way
        reason = getattr(error, "strerror", None) or one_line_message(error)
        raise UserError(f"expected OUT in a folder that can be written, got {out}: {reason}") from error
    return names


def read_whole(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Read a tensor of the model whole, as it is stored."""
    record = checkpoint.record(f"{MODEL}/{name}")
    return read_tensor(checkpoint, f"{MODEL}/{name}", 0, record.numel).reshape(record.shape)


def model_config(checkpoint: Checkpoint, dtype: str) -> dict[str, Any]:
    """Return the content of config.json of the model of a checkpoint."""
    metadata = checkpoint.manifest.metadata
    config = {**metadata["transformers_config"], "architectures": metadata["architectures"], "dtype": dtype}
    config.pop("use_cache", None)  # training turns the cache off; generation needs it
    return config


def _write_weights(exporter: Exporter, out: Path, dtype: torch.dtype) -> None:
    groups = list(_groups(exporter.sizes(dtype)))
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(groups, 1):
        number_of = "" if len(groups) == 1 else f"-{number:05d}-of-{len(groups):05d}"
        file = f"{exporter.stem}{number_of}.safetensors"
        total += _write_file(exporter, out / file, names, dtype)
        weight_map |= dict.fromkeys(names, file)
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(out / f"{exporter.stem}.safetensors.index.json", index)


def _write_file(exporter: Exporter, path: Path, names: list[str], dtype: torch.dtype) -> int:
    """Write the tensors of one file, return their bytes; they are freed before the next file is read."""
    tensors = {name: exporter.tensor(name, dtype).contiguous() for name in names}
    save_file(tensors, path, metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def _groups(sizes: dict[str, int]) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file."""
    group: list[str] = []
    size = 0
    for name, num_bytes in sizes.items():
        if group and size + num_bytes > FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += num_bytes
    yield group


def _export_dtype(record: TensorRecord, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a tensor in the files. Buffers keep theirs: the precision of training is of parameters."""
    stored_dtype: torch.dtype = getattr(torch, record.dtype)
    return dtype if stored_dtype.is_floating_point and record.kind != "buffer" else stored_dtype


def read_tokenizer_files(config: Any, base: Path | None) -> dict[str, bytes]:
    """Read the tokenizer's files of a run's data: from the data set, `rl.tokenizer`, or the model.

    Args:
        config: Settings of the run.
        base: Where the model is now that the run began with; None: where it was.
    """
    of_prompts = config.get("rl", {}).get("tokenizer")
    candidates = [config["data"]["path"], of_prompts, base or config["model"]["path"]]
    return next((files for candidate in candidates if candidate and (files := tokenizer_files(Path(candidate)))), {})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

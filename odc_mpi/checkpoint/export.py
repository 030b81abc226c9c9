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
from odc_mpi.errors import UserError, in_one_line
from odc_mpi.files import sync_directory, sync_file

#: Bytes of weights in one file; a larger tensor has a file of its own.
FILE_BYTES = 1 << 30


class Exported(ABC):
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
        """Return the bytes of each tensor in the files, by its name there, in the order of the files. Local."""

    @abstractmethod
    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read a tensor, and make it of this type if it is floating-point. Local."""

    @abstractmethod
    def config(self, dtype: str) -> dict[str, Any]:
        """Return the content of the configuration. Local."""


class WholeModel(Exported):
    """A model that a checkpoint holds whole.

    Raises:
        UserError: The checkpoint is of another kind of model, or of adapters alone.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        about = checkpoint.manifest.about
        if "transformers_config" not in about:
            raise UserError(f"{checkpoint.directory} is not of a transformers model: read it with h5py, see index.h5")
        if "base" in about:
            raise UserError(f"{checkpoint.directory} holds adapters alone: export them, or the model with --merge")
        self._checkpoint = checkpoint
        self.dtype = about["config"]["model"]["param_dtype"]

    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        """See `Exported`. A tied parameter is there once, as transformers expects it."""
        return {
            path.removeprefix(f"{MODEL}/"): record.numel * _in_files(record, dtype).itemsize
            for path, record in self._checkpoint.manifest.tensors.items()
            if record.kind != "state"
        }

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See `Exported`."""
        whole = read_whole(self._checkpoint, name)
        return whole.to(_in_files(self._checkpoint.record(f"{MODEL}/{name}"), dtype))

    def config(self, dtype: str) -> dict[str, Any]:
        """See `Exported`."""
        return model_config(self._checkpoint, dtype)


def export(
    checkpoint: Checkpoint,
    out: Path,
    dtype: str | None = None,
    exported: Exported | None = None,
    base: Path | None = None,
) -> list[str]:
    """Write a model such that `AutoModelForCausalLM.from_pretrained(out)` loads it. Local.

    Args:
        checkpoint: A checkpoint of `odc-mpi train`.
        out: A directory that does not exist or is empty; it appears complete or not at all.
        dtype: Type of floating-point weights, as torch names it; by default that of `exported`.
        exported: What of the checkpoint is written; by default the model that it holds.
        base: Where the model is now that the run began with, for its tokenizer; None: where it was.

    Returns:
        The names of the files.

    Raises:
        UserError: The checkpoint is damaged or of another kind of model, or `out` cannot be written.
    """
    exported = exported or WholeModel(checkpoint)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"expected OUT to be a new directory, got {out}, which is there: choose another")
    dtype = dtype or exported.dtype
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
            made = Path(name, "model")
            made.mkdir()
            _write_weights(exported, made, getattr(torch, dtype))
            _write_json(made / exported.config_name, exported.config(dtype))
            write_files(tokenizer_of(checkpoint.manifest.about["config"], base), made)
            names = sorted(path.name for path in made.iterdir())
            for path in made.iterdir():
                sync_file(path)
            sync_directory(made)
            made.replace(out)
        sync_directory(out.parent)
    except (OSError, SafetensorError) as error:  # safetensors tells of a full disk in its own way
        reason = getattr(error, "strerror", None) or in_one_line(error)
        raise UserError(f"expected OUT in a folder that can be written, got {out}: {reason}") from error
    return names


def read_whole(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Read a tensor of the model whole, as it is stored. Local."""
    record = checkpoint.record(f"{MODEL}/{name}")
    return read_tensor(checkpoint, f"{MODEL}/{name}", 0, record.numel).reshape(record.shape)


def model_config(checkpoint: Checkpoint, dtype: str) -> dict[str, Any]:
    """Return the content of config.json of the model of a checkpoint. Local."""
    about = checkpoint.manifest.about
    config = {**about["transformers_config"], "architectures": about["architectures"], "dtype": dtype}
    config.pop("use_cache", None)  # training turns the cache off; generation needs it
    return config


def _write_weights(exported: Exported, out: Path, dtype: torch.dtype) -> None:
    groups = list(_groups(exported.sizes(dtype)))
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(groups, 1):
        number_of = "" if len(groups) == 1 else f"-{number:05d}-of-{len(groups):05d}"
        file = f"{exported.stem}{number_of}.safetensors"
        total += _write_file(exported, out / file, names, dtype)
        weight_map |= dict.fromkeys(names, file)
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(out / f"{exported.stem}.safetensors.index.json", index)


def _write_file(exported: Exported, path: Path, names: list[str], dtype: torch.dtype) -> int:
    """Write the tensors of one file, return their bytes; they are freed before the next file is read."""
    tensors = {name: exported.tensor(name, dtype).contiguous() for name in names}
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


def _in_files(record: TensorRecord, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a tensor in the files. Buffers keep theirs: the precision of training is of parameters."""
    own: torch.dtype = getattr(torch, record.dtype)
    return dtype if own.is_floating_point and record.kind != "buffer" else own


def tokenizer_of(config: Any, base: Path | None) -> dict[str, bytes]:
    """Read the tokenizer's files of a run's data: from the data set, `rl.tokenizer`, or the model. Local.

    Args:
        config: Settings of the run.
        base: Where the model is now that the run began with; None: where it was.
    """
    of_prompts = config.get("rl", {}).get("tokenizer")
    places = [config["data"]["path"], of_prompts, base or config["model"]["path"]]
    return next((files for place in places if place and (files := tokenizer_files(Path(place)))), {})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""From a checkpoint to a Hugging Face directory: config.json, safetensors, the tokenizer's files. One process.

The weights of one file at a time are in memory, never the whole model. Optimizer state is not exported.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.state import MODEL, read_tensor
from odc_mpi.data.tokenizer import directory_beside, tokenizer_files, write_files
from odc_mpi.errors import UserError, in_one_line
from odc_mpi.files import sync_directory, sync_file

#: Bytes of weights in one file; a larger tensor has a file of its own.
FILE_BYTES = 1 << 30
_WEIGHTS, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


def export(checkpoint: Checkpoint, out: Path, dtype: str | None = None, file_bytes: int = FILE_BYTES) -> list[str]:
    """Write a model such that `AutoModelForCausalLM.from_pretrained(out)` loads it. Local.

    Args:
        checkpoint: A checkpoint of `odc-mpi train`.
        out: A directory that does not exist or is empty; it appears complete or not at all.
        dtype: Type of floating-point weights, as torch names it; by default the type in which the run computed.
        file_bytes: The most bytes of weights in one file.

    Returns:
        The names of the files.

    Raises:
        UserError: The checkpoint is damaged or of another kind of model, or `out` cannot be written.
    """
    about = checkpoint.manifest.about
    if "transformers_config" not in about:
        raise UserError(f"{checkpoint.directory} is not of a transformers model: read it with h5py, see index.h5")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"expected OUT to be a new directory, got {out}, which is there: choose another")
    dtype = dtype or about["config"]["model"]["param_dtype"]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
            made = Path(name, "model")
            made.mkdir()
            _write_weights(checkpoint, made, getattr(torch, dtype), file_bytes)
            _write_json(made / _CONFIG, _config(about, dtype))
            write_files(_tokenizer_of(about["config"]), made)
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


def _write_weights(checkpoint: Checkpoint, out: Path, dtype: torch.dtype, file_bytes: int) -> None:
    groups = list(_groups(checkpoint, dtype, file_bytes))
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(groups, 1):
        file = _WEIGHTS if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        total += _write_file(checkpoint, out / file, names, dtype)
        weight_map |= dict.fromkeys(names, file)
    if len(groups) > 1:
        _write_json(out / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_file(checkpoint: Checkpoint, path: Path, names: list[str], dtype: torch.dtype) -> int:
    """Write the tensors of one file, return their bytes; they are freed before the next file is read."""
    tensors = {name: _tensor(checkpoint, name, dtype) for name in names}
    save_file(tensors, path, metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def _groups(checkpoint: Checkpoint, dtype: torch.dtype, file_bytes: int) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file. A tied parameter is there once, as transformers expects it."""
    group: list[str] = []
    size = 0
    for path, record in checkpoint.manifest.tensors.items():
        if record.kind == "state":
            continue
        own = getattr(torch, record.dtype)
        num_bytes = torch.Size(record.shape).numel() * (dtype if own.is_floating_point else own).itemsize
        if group and size + num_bytes > file_bytes:
            yield group
            group, size = [], 0
        group.append(path.removeprefix(f"{MODEL}/"))
        size += num_bytes
    yield group


def _tensor(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
    record = checkpoint.record(f"{MODEL}/{name}")
    numel = torch.Size(record.shape).numel()
    whole = read_tensor(checkpoint, f"{MODEL}/{name}", 0, numel).reshape(record.shape)
    # Buffers keep their type: the precision of the training is that of parameters.
    return whole.to(dtype) if whole.is_floating_point() and record.kind != "buffer" else whole


def _config(about: Any, dtype: str) -> dict[str, Any]:
    config = {**about["transformers_config"], "architectures": about["architectures"], "dtype": dtype}
    config.pop("use_cache", None)  # training turns the cache off; generation needs it
    return config


def _tokenizer_of(config: Any) -> dict[str, bytes]:
    """Read the files of the tokenizer of the training data: from the data set, else beside it, else of the model."""
    data = Path(config["data"]["path"])
    places = [data, directory_beside(data)]
    if config["model"]["path"] is not None:
        places.append(Path(config["model"]["path"]))
    return next((files for files in map(tokenizer_files, places) if files), {})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

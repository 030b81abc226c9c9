"""Reading adapters and their base: peft directories, and the base models of adapter checkpoints.

Peft directories contain adapter_config.json and adapter_model.safetensors, but no base model. Each rank reads only its
own slices of the base model, but all adapters and all modules in `modules_to_save`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from typing_extensions import override

from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.errors import UserError, one_line_message
from odc_mpi.files import read_settings
from odc_mpi.hub import cached_model_path, download_hint
from odc_mpi.models import build
from odc_mpi.models.adapters.add import OPTIONAL_SETTINGS, SETTINGS, add_adapters, base_name, is_trained, peft_name
from odc_mpi.models.adapters.check import HashedWeights, check_base, describe_base
from odc_mpi.models.configuration import first_difference, full_configuration
from odc_mpi.models.heads import REWARD, prediction_task, set_padding
from odc_mpi.models.quantization.quantize import quantize
from odc_mpi.shard.local_shards import WeightSource

#: File names that peft uses.
CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Changes to the base's configuration (`model.config` of the run), which an export adds. peft does not read them.
BASE_CONFIG = "base_config.json"
#: Entries of adapter_config.json that may have any value: those that `add_adapters` uses, and those that have no effect
#: after training.
_NEUTRAL = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    *("ensure_weight_tying", "megatron_core", "qalora_group_size", "runtime_config"),
    *SETTINGS,
    *OPTIONAL_SETTINGS,
}
#: Supported values of other entries. An entry that is not listed must be empty.
_SUPPORTED = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian", "orthogonal")}


def is_peft_directory(path: Path) -> bool:
    """Return True if `path` contains adapter_config.json, as peft directories do."""
    return (path / CONFIG).is_file()


def base_model_path(path: Path, base: Path | None = None) -> Path:
    """Return the base model's directory: `base` if given, otherwise the one that adapter_config.json in `path` names.

    Raises `UserError` if adapter_config.json cannot be read or names no base model, or if that model is not on disk.
    """
    config = {"base_model_name_or_path": base} if base else _read_config(path)
    name = config.get("base_model_name_or_path")
    if not name:
        raise UserError(
            f"{path / CONFIG}: base_model_name_or_path, the directory of the base, is missing. A randomly initialized "
            "base is not on disk: use the run instead of the exported adapter"
        )
    revision = config.get("revision")
    name = cached_model_path(f"{name}@{revision}" if revision and not Path(name).exists() else str(name))
    if not build.is_model_directory(Path(name)):
        raise UserError(
            f"{path} is a LoRA adapter, but its base model is not in {name} (no config.json there). Pass --base DIR, "
            f"or change base_model_name_or_path in {CONFIG}{download_hint(name)}"
        )
    return Path(name)


def from_peft_directory(path: Path, attn_implementation: str = "sdpa", base: Path | None = None) -> build.MetaModel:
    """Build a model with the adapters in a peft directory, like `PeftModel.from_pretrained`.

    For `base`, see `base_model_path`. Base parameters have the `stored_dtype` of the base model, and adapters are
    float32. The base model is not verified, because peft does not store digests. Raises `UserError` if a file is
    missing or damaged, or if the adapters are not plain LoRA or do not fit the base model.
    """
    base = base_model_path(path, base)
    config = _read_config(path)
    if missing := sorted(set(SETTINGS) - config.keys()):
        raise UserError(f"{path / CONFIG}: the entry {missing[0]} is missing")
    for name, value in config.items():  # such as DoRA
        if name not in _NEUTRAL and value not in _SUPPORTED.get(name, (None, False, {}, [])):
            raise UserError(f"{path / CONFIG}: expected plain LoRA, got {name} {value!r}, which is not supported")
    meta_model = build.from_directory(base, attn_implementation, read_settings(path / BASE_CONFIG))
    meta_model = add_adapters(meta_model, config, 0, stored_dtype(base))
    return replace(meta_model, weights=_PeftWeights(path, meta_model.module, meta_model.weights))


def stored_dtype(directory: Path) -> torch.dtype:
    """Return `torch.bfloat16` if config.json in a model directory specifies it, otherwise `torch.float32`."""
    content = read_settings(directory / "config.json")
    name = content.get("dtype") or content.get("torch_dtype")
    return torch.bfloat16 if name == "bfloat16" else torch.float32


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
    task = prediction_task(checkpoint.manifest.metadata["architectures"][0])
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
    quantization = record.get("quantization") or {}
    if "bitsandbytes" in quantization:
        meta_model = quantize(meta_model, quantization, getattr(torch, quantization["dtype"]))
    check_base(cast(HashedWeights, meta_model.weights), record, rank, size)
    return meta_model


class _PeftWeights(WeightSource):
    """Source of a base model's weights and of the adapters in a peft directory. All adapters are kept in memory."""

    def __init__(self, path: Path, module: nn.Module, base: WeightSource) -> None:
        file = path / _WEIGHTS
        self._base = base
        if not file.is_file():
            raise UserError(f"expected {_WEIGHTS} in {path}, found none (pickled weights are not read)")
        try:
            self._stored = load_file(file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {file}: {one_line_message(error)}") from error
        shapes = {peft_name(name): p.shape for name, p in module.named_parameters() if is_trained(name)}
        if differing := sorted(shapes.keys() ^ self._stored.keys()):
            problem = "is missing" if differing[0] in shapes else "is not in the model"
            raise UserError(f"{file}: {differing[0]} {problem}: expected the tensors of {CONFIG} and the base model")
        for name, shape in shapes.items():
            if self._stored[name].shape != shape:
                raise UserError(
                    f"{file}: expected {name} of the shape {list(shape)}, got {list(self._stored[name].shape)}: the "
                    "adapter was trained with a different base"
                )

    @override
    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if is_trained(name):
            return self._stored[peft_name(name)].reshape(-1)[start:stop]
        return self._base.read(base_name(name), start, stop)


def _read_config(path: Path) -> dict[str, Any]:
    content = read_settings(path / CONFIG)
    if (kind := content.get("peft_type")) != "LORA":
        raise UserError(f"{path / CONFIG}: expected peft_type LORA, got {kind!r}: other adapters are not supported")
    return content

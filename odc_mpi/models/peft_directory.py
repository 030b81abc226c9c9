"""Adapters in a directory as peft writes it: adapter_config.json, adapter_model.safetensors; the base lies elsewhere.

The base is read slice by slice. The adapters themselves, and modules that were trained whole, are read whole on every
rank. No communication.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from odc_mpi.errors import UserError, one_line_message
from odc_mpi.models import build
from odc_mpi.models.adapters import SETTINGS, add_adapters, base_name, is_trained, peft_name
from odc_mpi.shard.local_shards import WeightSource

#: peft's own file names.
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Entries of adapter_config.json that change nothing of what trained adapters compute, whatever their value.
_NEUTRAL = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    *("ensure_weight_tying", "megatron_core", "qalora_group_size", "runtime_config"),
    *SETTINGS,
}
#: Entries with the values that are served; of all others only what is empty is.
_SUPPORTED = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian", "orthogonal")}


def is_peft_directory(path: Path) -> bool:
    """Return whether a path is a directory of adapters."""
    return (path / _CONFIG).is_file()


def base_model_path(path: Path, base: Path | None = None) -> Path:
    """Return the directory of the base of a directory of adapters.

    Args:
        path: Directory with adapter_config.json.
        base: Where the base is; None: where adapter_config.json says.

    Raises:
        UserError: adapter_config.json cannot be read, or there is no model in that place.
    """
    name = base or _read_config(path).get("base_model_name_or_path")
    if not name:
        raise UserError(
            f"{path / _CONFIG}: expected base_model_name_or_path, the directory of the base, got none: a base that was "
            "drawn at random is not on disk, give the run in place of the exported adapters"
        )
    if not build.is_model_directory(Path(name)):
        raise UserError(
            f"{path} holds adapters, expected their base in {name}, where there is no Hugging Face directory: say "
            f"where it is with --base, or change base_model_name_or_path in {_CONFIG}"
        )
    return Path(name)


def from_peft_directory(path: Path, attn_implementation: str = "sdpa", base: Path | None = None) -> build.MetaModel:
    """Build a model with the adapters of a directory, as `PeftModel.from_pretrained` does.

    Args:
        path: Directory with adapter_config.json and adapter_model.safetensors.
        attn_implementation: Attention within each packed sequence, "sdpa" or "eager".
        base: Directory of the base; None: where adapter_config.json says. It has no digest to compare with.

    Returns:
        The model. The parameters of the base are of the type that its config.json names, adapters are float32.

    Raises:
        UserError: The base is not there, a file is missing or damaged, or these are not the adapters of that base, or
            not plain LoRA.
    """
    base = base_model_path(path, base)
    config = _read_config(path)
    _require_supported(path, config)
    meta_model = build.from_directory(base, attn_implementation)
    meta_model = add_adapters(meta_model, config, 0, stored_dtype(base))
    return replace(meta_model, weights=_StoredAdapters(path, meta_model.module, meta_model.weights))


def stored_dtype(directory: Path) -> torch.dtype:
    """Return the type that config.json of a model names, if ranks can compute in it, else float32."""
    content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    name = content.get("dtype") or content.get("torch_dtype")
    return torch.bfloat16 if name == "bfloat16" else torch.float32


class _StoredAdapters:
    """Parameters of a base, and over it those of a file of adapters: a `shard.local_shards.WeightSource`."""

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
        differing = sorted(shapes.keys() ^ self._stored.keys())
        if differing:
            location = "is missing" if differing[0] in shapes else "is not of the model"
            raise UserError(f"{file}: {differing[0]} {location}: expected what {_CONFIG} and the base together name")
        for name, shape in shapes.items():
            if self._stored[name].shape != shape:
                raise UserError(
                    f"{file}: expected {name} of the shape {list(shape)}, got {list(self._stored[name].shape)}: the "
                    "base is another than that of the adapters"
                )

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`."""
        if is_trained(name):
            return self._stored[peft_name(name)].reshape(-1)[start:stop]
        return self._base.read(base_name(name), start, stop)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads((path / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path / _CONFIG}: expected the JSON of a configuration of peft, got {error}") from error
    if not isinstance(content, dict) or content.get("peft_type") != "LORA":
        kind = content.get("peft_type") if isinstance(content, dict) else content
        raise UserError(f"{path / _CONFIG}: expected peft_type LORA, got {kind!r}: no other adapters are served")
    return content


def _require_supported(path: Path, config: dict[str, Any]) -> None:
    """Refuse whatever would change the computation and is not served: DoRA, rsLoRA, patterns of ranks and the like."""
    missing = sorted(set(SETTINGS) - config.keys())
    if missing:
        raise UserError(f"{path / _CONFIG}: expected the entry {missing[0]}, got none")
    for name, value in config.items():
        if name not in _NEUTRAL and value not in _SUPPORTED.get(name, (None, False, {}, [])):
            raise UserError(f"{path / _CONFIG}: expected plain LoRA, got {name} {value!r}, which is not served")

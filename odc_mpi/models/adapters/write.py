"""Contents of exported adapters, for peft, and of base models with merged adapters. `models/export.py` writes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from typing_extensions import override

from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.state import MODEL, read_tensor
from odc_mpi.errors import UserError, warn
from odc_mpi.hub import cached_model_path, parse_name
from odc_mpi.models.adapters.add import (
    ADAPTER,
    adapted_layers,
    add_adapters,
    add_product,
    base_name,
    is_adapter,
    peft_name,
)
from odc_mpi.models.adapters.read import BASE_CONFIG, CONFIG, load_base
from odc_mpi.models.build import MetaModel, is_model_directory
from odc_mpi.models.quantization.quantize import DequantizedWeights, dequantized_shapes
from odc_mpi.models.weights.conversion import PlacedTensor
from odc_mpi.shard.local_shards import WeightSource


def adapter_contents(
    checkpoint: Checkpoint, base: Path | None
) -> tuple[dict[str, PlacedTensor], dict[str, dict[str, Any]]]:
    """Return the tensors of adapter_model.safetensors, and the contents of JSON files, keyed by their exported names.

    Raises `UserError` if `base` is not the base model of the adapters, or if the base is multimodal.
    """
    if base is not None:
        load_base(checkpoint, base=base)
    metadata = checkpoint.manifest.metadata
    location = str(base or "") or metadata["base"]["path"] or ""
    if location and Path(location).exists():  # peft may load the adapters in another working directory
        location = str(Path(location).absolute())
    path = Path(cached_model_path(location))
    if location and is_model_directory(path) and _is_multimodal(path):
        raise UserError(
            f"{checkpoint.directory} has adapters of the text model of {path}, which is multimodal: peft would not "
            "find their layers, so export the merged text model with --merge"
        )
    tensors = {
        peft_name(name): PlacedTensor.from_stored(name, checkpoint.record(f"{MODEL}/{name}").shape)
        for name in _trained(checkpoint)
    }
    name, revision = parse_name(location) or (location or None, None)  # as peft names a base from the Hub
    files = {CONFIG: {**metadata["adapter"], "base_model_name_or_path": name, "revision": revision}}
    if location and (overrides := metadata["base"]["config"]):
        files[BASE_CONFIG] = overrides
        warn(
            f"WARNING: the run changed {', '.join(overrides)} of the base's configuration, which peft does not: make "
            f"the changes in {BASE_CONFIG} also in config.json of {location}, or export with --merge"
        )
    quantization = metadata["base"].get("quantization") or {}
    if "bitsandbytes" in quantization:
        warn(
            "WARNING: the adapters were trained over a base that was quantized to 4 bits, and fit its values: load the "
            f"base with BitsAndBytesConfig of transformers (load_in_4bit, {quantization['bnb_4bit_quant_type']}, "
            f"bnb_4bit_use_double_quant {quantization['bnb_4bit_use_double_quant']}), or export with --merge"
        )
    return tensors, files


class MergedWeights(WeightSource):
    """Source of a base model's tensors, with the adapters in a checkpoint merged into the weights.

    An adapted weight is `W + alpha / r * B @ A`, computed in float32. Modules trained in full replace the originals.
    The module of `base` is modified in place.
    """

    def __init__(self, checkpoint: Checkpoint, base: MetaModel, buffers: Mapping[str, torch.Tensor]) -> None:
        self._checkpoint, self._base, self._buffers = checkpoint, DequantizedWeights(base), buffers
        self._replaced = {base_name(name): name for name in _trained(checkpoint) if not is_adapter(name)}
        self._shapes = dequantized_shapes(base.module)
        self._module = add_adapters(base, checkpoint.manifest.metadata["adapter"], 0, torch.float32).module
        self._layers = adapted_layers(self._module)
        self._merged: tuple[str, torch.Tensor] | None = None

    @override
    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name in self._buffers:
            return self._buffers[name].reshape(-1)[start:stop]
        if name in self._replaced:
            return read_tensor(self._checkpoint, f"{MODEL}/{self._replaced[name]}", start, stop)
        if name not in self._layers:
            return self._base.read(name, start, stop)
        if self._merged is None or self._merged[0] != name:
            self._merged = name, self._merge(name).reshape(-1)
        return self._merged[1][start:stop].clone()  # tensors of a safetensors file cannot share memory

    def _merge(self, name: str) -> torch.Tensor:
        layer, shape = self._layers[name], self._shapes[name]
        weight = self._base.read(name, 0, shape.numel()).reshape(shape)
        a, b = (self._read_stored(f"{layer}.lora_{side}.{ADAPTER}.weight") for side in "AB")
        return add_product(self._module.get_submodule(layer), weight.float(), a, b)

    def _read_stored(self, name: str) -> torch.Tensor:
        record = self._checkpoint.record(f"{MODEL}/{name}")
        return read_tensor(self._checkpoint, f"{MODEL}/{name}", 0, record.numel).reshape(record.shape)


def _is_multimodal(path: Path) -> bool:
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return config.get_text_config() is not config


def _trained(checkpoint: Checkpoint) -> list[str]:
    tensors = checkpoint.manifest.tensors.items()
    return [path.removeprefix(f"{MODEL}/") for path, record in tensors if record.kind == "trainable"]

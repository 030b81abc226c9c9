"""Directories with 4-bit weights of bitsandbytes, as `save_pretrained` of a quantized model writes them.

Beside `NAME.weight`, such a directory stores `NAME.weight.absmax`, `.quant_map` and `.quant_state.bitsandbytes__TYPE`,
which has settings as JSON, and with double quantization `.nested_absmax` and `.nested_quant_map`. The bytes are used
unchanged.
"""

import json
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import transformers
from typing_extensions import override

from odc_mpi.errors import UserError
from odc_mpi.models.quantization.linear import (
    BLOCK_NUMEL,
    RANGE_BLOCKS,
    SCALES,
    QuantizedLinear,
    linear_layers,
    quantized_layers,
    replace_layer,
)
from odc_mpi.shard.local_shards import WeightSource

_STATE = "quant_state.bitsandbytes__"
#: Supported values of entries of `quantization_config`, with the default of transformers.
_SUPPORTED = {
    "quant_method": ("bitsandbytes", None),
    "load_in_4bit": (True, False),
    "bnb_4bit_quant_storage": ("uint8", "uint8"),
}


class StoredTensors(WeightSource, Protocol):
    """Source of the tensors in a directory. `file_of` maps their names to files."""

    file_of: Mapping[str, str]

    def whole(self, name: str) -> torch.Tensor:
        """Return a stored tensor, flattened."""


def take_quantization(config: transformers.PreTrainedConfig, setting: str) -> bool:
    """Return True if the weights of `config` are quantized, after removing `quantization_config` from it.

    transformers would otherwise quantize the model itself. Raises `UserError`, which begins with `setting`, for all
    formats except for 4 bits of bitsandbytes, stored as uint8.
    """
    stored: Any = getattr(config, "quantization_config", None)
    if not stored:
        return False
    content = stored if isinstance(stored, dict) else stored.to_dict()
    for key, (expected, default) in _SUPPORTED.items():
        if (value := content.get(key, default)) != expected:
            raise UserError(
                f"{setting}: the weights are quantized: expected {key} {expected} (4 bits by bitsandbytes), got {value}"
            )
    del config.quantization_config
    return True


def replace_stored(module: transformers.PreTrainedModel, files: StoredTensors) -> dict[str, Any]:
    """Replace the linear layers for which `files` have 4-bit weights, and return the settings of the last one.

    Raises `UserError` if there is none, or if one has other block sizes than 64 elements and 256 scales.
    """
    settings: dict[str, Any] = {}
    states = {name: key for key in files.file_of for name, _, rest in [key.partition(f".weight.{_STATE}")] if rest}
    for name in linear_layers(module):
        if name not in states:
            continue
        quant_type, stored = states[name].rpartition("__")[2], json.loads(bytes(files.whole(states[name]).numpy()))
        sizes, double_quant = (stored["blocksize"], stored.get("nested_blocksize")), "nested_blocksize" in stored
        if sizes not in ((BLOCK_NUMEL, RANGE_BLOCKS), (BLOCK_NUMEL, None)):
            raise UserError(
                f"model.path: expected weights in blocks of {BLOCK_NUMEL}, and scales of {RANGE_BLOCKS}, got {sizes} "
                f"of {name}: quantize the model again with the defaults of bitsandbytes"
            )
        dtype = getattr(torch, stored["dtype"])
        replace_layer(module, name, quant_type=quant_type, double_quant=double_quant, stored_dtype=dtype)
        settings = {"bnb_4bit_quant_type": quant_type, "bnb_4bit_use_double_quant": double_quant}
    if not settings:
        raise UserError("model.path: expected 4-bit weights, as config.json says, found none for linear layers")
    return settings


class StoredScales(WeightSource):
    """Source of the parameters `weight_scales` of a module whose quantized weights are in `files`."""

    def __init__(self, files: StoredTensors, module: torch.nn.Module) -> None:
        self._files, self._layers = files, dict(quantized_layers(module))
        self._keys: dict[str, list[str]] = {}
        for key in files.file_of if self._layers else ():
            layer, _, rest = key.partition(".weight.")
            if rest:
                self._keys.setdefault(layer, []).append(key)

    @override
    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        layer = name.removesuffix(f".{SCALES}")
        stored = {key.removeprefix(f"{layer}.weight."): self._files.whole(key) for key in self._keys[layer]}
        scales = pack_scales(stored, self._layers[layer])
        if scales.shape != self._layers[layer]._parameters[SCALES].shape:  # type: ignore[union-attr]
            raise UserError(f"model.path: the stored scales of {layer} have a wrong size: download the files again")
        return scales[start:stop]


def pack_scales(stored: Mapping[str, torch.Tensor], layer: QuantizedLinear) -> torch.Tensor:
    """Return the parameter `weight_scales` of a layer, given the tensors that bitsandbytes stores beside its weight."""
    arrays = [stored["quant_map"]]
    if layer.double_quant:
        content = next(value for key, value in stored.items() if key.startswith(_STATE))
        mean = torch.zeros(8)
        mean[0] = json.loads(bytes(content.numpy()))["nested_offset"]
        arrays += [stored["nested_quant_map"], mean, stored["nested_absmax"]]
    return torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in (*arrays, stored["absmax"])])

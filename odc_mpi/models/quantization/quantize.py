"""Quantization of a model's weights while they are read (`model.load_in_4bit`).

Rank i of n quantizes layers i, i + n, ... of those to quantize, at the first read, and sends each rank the bytes that
it owns. A layer is quantized as a whole, since its scales have a common mean. Its bytes therefore do not depend on the
number of ranks.
"""

import hashlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import override

from odc_mpi.errors import UserError
from odc_mpi.models.adapters.check import HashedWeights
from odc_mpi.models.build import MetaModel
from odc_mpi.models.quantization.library import import_functional
from odc_mpi.models.quantization.linear import (
    BLOCK_NUMEL,
    SCALES,
    QuantizedLinear,
    linear_layers,
    quantized_layers,
    replace_layer,
)
from odc_mpi.models.quantization.stored import pack_scales
from odc_mpi.runtime.world import World
from odc_mpi.shard.local_shards import WeightSource

#: Settings of the section `model`, with the names of transformers' `BitsAndBytesConfig`.
SETTINGS = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant")


def quantize(meta_model: MetaModel, settings: Mapping[str, Any], dtype: torch.dtype) -> MetaModel:
    """Replace the linear layers of a model, except its head, with quantized ones. The model is modified in place.

    As in transformers, the weights are rounded to `dtype` first. `settings` has values for `SETTINGS`. Raises
    `UserError` if bitsandbytes is not installed, the model is quantized already, or the elements of a weight are not a
    multiple of 64.
    """
    module = meta_model.module
    if meta_model.quantization:
        raise UserError("model.load_in_4bit: the weights in model.path are quantized already: set it to false")
    try:
        version = importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            "model.load_in_4bit: requires the package bitsandbytes, which is not installed: pip install "
            "'odc_mpi[quant]', or set it to false"
        ) from error
    chosen = {name: settings[name] for name in SETTINGS}
    quant_type, double_quant = (chosen[name] for name in SETTINGS)
    for name in linear_layers(module):
        replace_layer(module, name, quant_type=quant_type, double_quant=double_quant, stored_dtype=dtype)
    weights = QuantizingWeights(cast(HashedWeights, meta_model.weights), module)
    record = {**chosen, "dtype": str(dtype).removeprefix("torch."), "bitsandbytes": version}
    return replace(meta_model, weights=weights, quantization=record)


class QuantizingWeights(HashedWeights):
    """Source of a model's weights that quantizes those of its quantized layers.

    If `world` is set, `read` is collective for these layers: all ranks read the same parameters in the same order.

    Args:
        base: Source of all weights before quantization.
        module: Model whose layers have been replaced with `QuantizedLinear`.

    Attributes:
        world: Ranks that read the weights together, or None if this rank reads them alone.
    """

    def __init__(self, base: HashedWeights, module: nn.Module) -> None:
        self._base = base
        self._layers = dict(quantized_layers(module))
        self._roots = {name: index for index, name in enumerate(self._layers)}
        self._quantized: dict[str, dict[str, torch.Tensor]] = {}
        self._has_started = False
        self.world: World | None = None

    @override
    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        layer, _, parameter = name.rpartition(".")
        if layer not in self._layers or parameter not in ("weight", SCALES):
            return self._base.read(name, start, stop)
        if self.world is None:
            return self._read_whole(layer, parameter)[start:stop]
        if not self._has_started:
            self._has_started = True
            for other in list(self._layers)[self.world.rank :: self.world.size]:
                self._quantize(other)  # on all ranks at the same time, not one by one when their layers are read
        root = self._roots[layer] % self.world.size
        ranges = self.world.gather_objects((start, stop))
        parts = None
        if root == self.world.rank:
            whole = self._read_whole(layer, parameter)
            parts = [whole[first:last].numpy() for first, last in ranges]
        return torch.from_numpy(self.world.scatter_objects(parts, root))

    @override
    def parts(self) -> list[str]:
        hidden = {f"{name}.{parameter}" for name in self._layers for parameter in ("weight", SCALES)}
        # In this order, so that each rank verifies the layers that it quantizes.
        return [*self._layers, *(part for part in self._base.parts() if part not in hidden)]

    @override
    def digest(self, part: str) -> str:
        if part not in self._layers:
            return self._base.digest(part)
        digest = hashlib.sha256()
        for parameter in self._quantize(part).values():
            digest.update(parameter.numpy().tobytes())
        return digest.hexdigest()

    def _read_whole(self, layer: str, parameter: str) -> torch.Tensor:
        """Return all bytes of a parameter, and forget the layer with its last parameter."""
        quantized = self._quantize(layer)
        if parameter == SCALES:
            del self._quantized[layer]
        return quantized[parameter].view(-1)

    def _quantize(self, name: str) -> dict[str, torch.Tensor]:
        if name not in self._quantized:
            layer = self._layers[name]
            weight = self._base.read(f"{name}.weight", 0, layer.numel).to(layer.stored_dtype)
            self._quantized[name] = _quantize_weight(weight, layer)
        return self._quantized[name]


def _quantize_weight(weight: torch.Tensor, layer: QuantizedLinear) -> dict[str, torch.Tensor]:
    packed, state = import_functional().quantize_4bit(
        weight.view(layer.out_features, layer.in_features),
        blocksize=BLOCK_NUMEL,
        compress_statistics=layer.double_quant,
        quant_type=layer.quant_type,
    )
    return {"weight": packed, SCALES: pack_scales(state.as_dict(packed=True), layer)}


class DequantizedWeights(WeightSource):
    """Source of a model's weights that dequantizes those of its quantized layers to the dtype before quantization."""

    def __init__(self, meta_model: MetaModel) -> None:
        self._weights = meta_model.weights
        self._layers = {f"{name}.weight": layer for name, layer in quantized_layers(meta_model.module)}

    @override
    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name not in self._layers:
            return self._weights.read(name, start, stop)
        layer = self._layers[name]
        scales_name = f"{name.removesuffix('weight')}{SCALES}"
        weight = self._weights.read(name, 0, layer.numel // 2)
        scales = self._weights.read(scales_name, 0, layer.num_bytes - layer.numel // 2)
        return layer.dequantize(weight, scales, layer.stored_dtype).view(-1)[start:stop]


def dequantized_shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of a module's parameters, keyed by name, with those of dequantized weights."""
    layers = dict(quantized_layers(module))
    shapes = {name: p.shape for name, p in module.named_parameters() if not name.endswith(f".{SCALES}")}
    return shapes | {f"{name}.weight": torch.Size((x.out_features, x.in_features)) for name, x in layers.items()}


def share_reads(weights: WeightSource | None, world: World) -> None:
    """Make `read` of a `QuantizingWeights` collective over `world`. No effect on other sources."""
    if isinstance(weights, QuantizingWeights):
        weights.world = world

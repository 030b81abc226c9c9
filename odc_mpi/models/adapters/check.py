"""Checks of adapters: their settings against the model, and their base model against SHA-256 digests.

Instead of the base model, an adapter checkpoint contains the origin of this model (a directory, or a configuration and
a seed) and a SHA-256 digest of each of its parts. A part is a 256 MiB block of a safetensors file, or a randomly
initialized parameter. Each rank verifies a share of the parts.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from odc_mpi.errors import UserError
from odc_mpi.models.quantization.linear import QuantizedLinear
from odc_mpi.shard.local_shards import WeightSource

if TYPE_CHECKING:
    import transformers  # otherwise imported late: not every user of this module has a model

#: Pattern that matches a dotted name up to the layer number, as in peft.
LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")


class HashedWeights(WeightSource, Protocol):
    """Interface for weight sources that are divided into named parts, each of which has a digest."""

    def parts(self) -> list[str]:
        """Return the names of the parts."""

    def digest(self, part: str) -> str:
        """Read a part and return the SHA-256 digest of its content as a hexadecimal string."""


def part_digests(weights: HashedWeights, rank: int = 0, size: int = 1) -> dict[str, str]:
    """Read this rank's share of the parts and return their digests, keyed by part. `size` is the number of ranks."""
    return {part: weights.digest(part) for part in weights.parts()[rank::size]}


def check_base(weights: HashedWeights, record: Mapping[str, Any], rank: int = 0, size: int = 1) -> None:
    """Verify this rank's share of the adapters' base model. `size` is the number of ranks.

    `record`, from the checkpoint, describes the base model. It contains `path` (None for random weights), `config`,
    `seed`, `quantization` and `sha256`, the digests of the parts. Raises `UserError` if part names or digests differ
    from the record.
    """
    expected: Mapping[str, str] = record["sha256"]
    differing = sorted(expected.keys() ^ weights.parts()) or [
        part for part, digest in part_digests(weights, rank, size).items() if digest != expected[part]
    ]
    if differing:
        raise UserError(
            f"model: expected the base model of the adapters, {describe_base(record)}, got a different one: "
            f"{differing[0].rpartition(':')[0] or differing[0]} differs: set model.path or --base to the right base"
        )


def check_quantization(found: Mapping[str, Any] | None, record: Mapping[str, Any]) -> None:
    """Raise `UserError` if the settings of a base's 4-bit weights differ from those in the checkpoint's `record`."""
    expected, found = ({k: v for k, v in (each or {}).items() if k != "bitsandbytes"} for each in (record, found))
    if expected != found:
        texts = (", ".join(f"{key} {value}" for key, value in each.items()) or "none" for each in (expected, found))
        raise UserError(
            "model: expected the base as in the checkpoint, with the quantization {}, got {}: change "
            "model.load_in_4bit and model.bnb_4bit_*, or model.path".format(*texts)
        )


def describe_base(record: Mapping[str, Any]) -> str:
    """Return a description of a base model's origin for error messages. For `record`, see `check_base`."""
    quantization = record.get("quantization") or {}
    version = quantization.get("bitsandbytes")
    how = f", quantized by bitsandbytes {version}" if version else ""
    if record["path"] is not None:
        return f"from {Path(record['path'])}{how}"
    return f"a {record['config'].get('model_type')} randomly initialized with seed {record['seed']}{how}"


def check_names(module: "transformers.PreTrainedModel", settings: Mapping[str, Any]) -> None:
    """Raise `UserError` for names that match nothing, targets that peft cannot adapt, and tied embeddings."""
    modules = {name: m for name, m in module.named_modules() if name}
    parameters = {name: p for name, p in module.named_parameters() if p.ndim in (2, 3)}
    routers = set(find_routers(module)).difference(settings.get("exclude_modules") or ())
    linear = [name for name, m in modules.items() if isinstance(m, nn.Linear) and name not in routers]
    with_parameters = [name for name, m in modules.items() if any(True for _ in m.parameters(recurse=False))]
    targets = settings["target_modules"] or ()
    target_modules = {} if isinstance(targets, str) else _match("target_modules", modules, targets, linear)
    for target, names in target_modules.items():
        if other := next((name for name in names if name not in linear), None):
            raise UserError(
                f"lora.target_modules: expected names of linear layers, got {target}, which is a "
                f"{type(modules[other]).__name__}: choose among {_last_parts(linear)}"
            )
    saved_modules = _match("modules_to_save", modules, settings["modules_to_save"] or (), with_parameters)
    fused = [name for name in parameters if not name.endswith("weight")]
    target_parameters = _match("target_parameters", parameters, settings.get("target_parameters") or (), fused)
    if not targets and not target_parameters:
        raise UserError("lora.target_modules: expected names of linear layers, or lora.target_parameters, got neither")
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if head is not None and head.weight is embedding.weight:
        checked = {"target_modules": target_modules, "modules_to_save": saved_modules}
        for setting, matches in (checked | {"target_parameters": target_parameters}).items():
            for requested, names in matches.items():
                if any(modules.get(name.removesuffix(".weight")) in (embedding, head) for name in names):
                    raise UserError(
                        f"lora.{setting}: {requested} shares its weights between embedding and head, which cannot be "
                        "adapted separately: remove it"
                    )


def find_routers(module: nn.Module) -> list[str]:
    """Return the names of linear layers whose class overrides `nn.Linear.forward`, such as the routers of Llama 4.

    peft cannot adapt these layers correctly, because they return more than the product of the input and the weight.
    """
    linear = ((name, m) for name, m in module.named_modules() if isinstance(m, nn.Linear))
    return [n for n, m in linear if type(m).forward not in (nn.Linear.forward, QuantizedLinear.forward)]


def check_layers(module: nn.Module, settings: Mapping[str, Any], num_layers: int) -> None:
    """Raise `UserError` for layers that do not exist or settings to which peft does not apply `layers_to_transform`."""
    if (layers := settings.get("layers_to_transform")) is None:
        return
    layers = [layers] if isinstance(layers, int) else layers
    if missing := [layer for layer in layers if not 0 <= layer < num_layers]:
        raise UserError(f"lora.layers_to_transform: expected layers from 0 to {num_layers - 1}, got {missing[0]}")
    if isinstance(settings["target_modules"], str):
        linear = [name for name, m in module.named_modules() if isinstance(m, nn.Linear) and LAYER.match(name)]
        raise UserError(
            "lora.layers_to_transform: expected names in lora.target_modules, got "
            f"{settings['target_modules']}: choose among {_last_parts(linear)}"
        )
    names = [name for name, _ in module.named_parameters()]
    for target, matched in _match("target_parameters", names, settings.get("target_parameters") or (), names).items():
        for name in matched:
            if (match := LAYER.match(name)) is None or int(match[1]) not in layers:
                raise UserError(
                    f"lora.layers_to_transform: peft does not apply it to lora.target_parameters, and {target} is also "
                    f"in {name}: name parameters with their layers, as in {name}"
                )


def _match(
    setting: str, names: Collection[str], requested: Collection[str], known: Collection[str]
) -> dict[str, list[str]]:
    """Map each requested name to the matching entries of `names`. The error message suggests names from `known`."""
    matches = {
        target: [name for name in names if name == target or name.endswith(f".{target}")] for target in requested
    }
    if missing := next((target for target, matched in matches.items() if not matched), None):
        kind = "parameter of 2 or 3 dimensions" if setting == "target_parameters" else "module"
        raise UserError(f"lora.{setting}: no {kind} is named {missing}, expected some of {_last_parts(known)}")
    return matches


def _last_parts(names: Collection[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))

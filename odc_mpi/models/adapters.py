"""LoRA adapters, small trainable matrices that peft adds to linear layers of a frozen base model.

peft changes the model on the meta device, so no memory for parameters is allocated here. The result is the model of
transformers with the parameter names of peft:

    ...q_proj.base_layer.weight               base weight, frozen
    ...q_proj.lora_A.default.weight           adapter, initialized Kaiming-uniform, seeded by the seed and this name
    ...q_proj.lora_B.default.weight           adapter, initialized to zero
    lm_head.original_module.weight            weight of a module in `modules_to_save`, frozen
    lm_head.modules_to_save.default.weight    trainable copy of this weight
"""

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import transformers
from torch import nn
from typing_extensions import override

from odc_mpi.errors import UserError, one_line_message
from odc_mpi.models.build import MetaModel
from odc_mpi.models.weights.base_check import HashedWeights
from odc_mpi.shard.local_shards import WeightSource

#: Default adapter name of peft, a component of parameter names.
ADAPTER = "default"
#: Components that peft inserts into the names of base parameters.
_WRAPPERS = {"base_layer", "original_module", "modules_to_save", ADAPTER}
#: Prefix of the parameter names in adapter_model.safetensors.
_PREFIX = "base_model.model."
#: Supported settings of `LoraConfig` of peft.
SETTINGS = ("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save")


def add_adapters(meta_model: MetaModel, settings: Mapping[str, Any], seed: int, dtype: torch.dtype) -> MetaModel:
    """Add LoRA adapters to a model on the meta device. Only they and the copies of `modules_to_save` are trainable.

    Args:
        meta_model: Base model. Its module is changed in place.
        settings: Settings of `LoraConfig` of peft. Only those in `SETTINGS` are used, so the content of
            adapter_config.json may be passed.
        seed: Seed of the initial adapter weights.
        dtype: Type of the base parameters and, as in peft, of the copies of `modules_to_save`. Adapters are float32.

    Raises:
        UserError: peft is not installed, a name in `settings` matches no module, or a layer cannot be adapted.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(
            "lora: requires the package peft, which is not installed: pip install 'odc_mpi[lora]', or remove lora"
        ) from error
    module = meta_model.module
    _check_names(module, settings["target_modules"], settings["modules_to_save"] or ())
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    config = LoraConfig(task_type="CAUSAL_LM", **{name: settings[name] for name in SETTINGS})
    try:
        inject_adapter_in_model(config, module, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    except Exception as error:  # peft refuses with exceptions of many kinds
        raise UserError(f"lora: peft cannot adapt {type(module).__name__}: {one_line_message(error)}") from error
    weights, base = AdapterWeights(meta_model.weights, module, seed), cast(HashedWeights, meta_model.weights)
    return replace(meta_model, weights=weights, adapter=_as_json(config), base=base)


class AdapterWeights(WeightSource):
    """Source of the initial weights of a model with adapters.

    `seed` and the name of an adapter matrix determine its values, so they do not depend on the number of ranks.
    """

    def __init__(self, base: WeightSource, module: nn.Module, seed: int) -> None:
        self._base = base
        self._seed = seed
        self._shapes = {name: tuple(p.shape) for name, p in module.named_parameters() if is_adapter(name)}

    @override
    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if not is_adapter(name):
            return self._base.read(base_name(name), start, stop)
        matrix = torch.zeros(self._shapes[name])
        if ".lora_A." in name:
            digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
            nn.init.kaiming_uniform_(matrix, a=math.sqrt(5), generator=generator)  # as peft does
        return matrix.view(-1)[start:stop]


def is_adapter(name: str) -> bool:
    """Return True if the parameter with a dotted name is an adapter matrix."""
    return ".lora_" in name


def is_trained(name: str) -> bool:
    """Return True if the parameter with a dotted name is an adapter matrix, or part of a trainable copy of a module."""
    return is_adapter(name) or ".modules_to_save." in name


def peft_name(name: str) -> str:
    """Return the name that a trainable parameter has in adapter_model.safetensors."""
    return _PREFIX + (name.replace(f".{ADAPTER}.", ".") if is_adapter(name) else base_name(name))


def base_name(name: str) -> str:
    """Return the name that a base parameter has in the model without adapters."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _check_names(module: transformers.PreTrainedModel, targets: str | Collection[str], saved: Collection[str]) -> None:
    """Refuse names that match no module, targets that are not linear layers, and tied embeddings."""
    modules = {name: m for name, m in module.named_modules() if name}
    linear = [name for name, m in modules.items() if isinstance(m, nn.Linear)]
    with_parameters = [name for name, m in modules.items() if any(True for _ in m.parameters(recurse=False))]
    target_modules = {} if isinstance(targets, str) else _match_modules("target_modules", modules, targets, linear)
    for target, names in target_modules.items():
        if other := next((name for name in names if name not in linear), None):
            raise UserError(
                f"lora.target_modules: expected names of linear layers, got {target}, which is a "
                f"{type(modules[other]).__name__}: choose among {_last_parts(linear)}"
            )
    saved_modules = _match_modules("modules_to_save", modules, saved, with_parameters)
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if head is not None and head.weight is embedding.weight:
        for setting, matches in (("target_modules", target_modules), ("modules_to_save", saved_modules)):
            for requested, names in matches.items():
                if any(modules[name] in (embedding, head) for name in names):
                    raise UserError(
                        f"lora.{setting}: {requested} shares its weights between embedding and head, which cannot be "
                        "adapted separately: remove it"
                    )


def _match_modules(
    setting: str, modules: Collection[str], requested: Collection[str], known: Collection[str]
) -> dict[str, list[str]]:
    """Return the module names that each requested name matches; `known` are the names to propose in an error."""
    matches = {
        target: [name for name in modules if name == target or name.endswith(f".{target}")] for target in requested
    }
    if missing := next((target for target, names in matches.items() if not names), None):
        raise UserError(f"lora.{setting}: no module is named {missing}, expected some of {_last_parts(known)}")
    return matches


def _last_parts(names: Collection[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))


def _as_json(config: Any) -> dict[str, Any]:
    content = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    content["peft_type"] = "LORA"
    return content | {"inference_mode": True}

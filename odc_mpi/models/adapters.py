"""LoRA adapters, by peft: small trained matrices beside the linear layers of a frozen base.

peft puts its layers into the model on the meta device, so nothing here takes memory for parameters. The model stays the
transformers model that it was; names in it are peft's:

    ...q_proj.base_layer.weight            the base, frozen
    ...q_proj.lora_A.default.weight        an adapter: kaiming-uniform at first, drawn from the seed and this name
    ...q_proj.lora_B.default.weight        an adapter: zero at first
    lm_head.original_module.weight         the base, frozen, of a module that is trained whole
    lm_head.modules_to_save.default.weight    its trained copy
"""

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import transformers
from torch import nn

from odc_mpi.errors import UserError, one_line_message
from odc_mpi.models.build import MetaModel
from odc_mpi.models.weights import HashedWeights
from odc_mpi.shard.local_shards import WeightSource

#: peft's default name of an adapter, a part of the names of parameters.
ADAPTER = "default"
#: Parts of names that peft inserts into those of the base.
_WRAPPERS = {"base_layer", "original_module", "modules_to_save", ADAPTER}
#: What peft puts before the names of parameters in adapter_model.safetensors.
_PREFIX = "base_model.model."
#: The settings that make an adapter what it is, in peft's names.
SETTINGS = ("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save")


def add_adapters(meta_model: MetaModel, settings: Mapping[str, Any], seed: int, dtype: torch.dtype) -> MetaModel:
    """Put LoRA adapters into a model on the meta device, and freeze everything else.

    Args:
        meta_model: The base; its module is changed.
        settings: In peft's names: r, lora_alpha, lora_dropout, target_modules (a list, or all-linear),
            modules_to_save. Others are ignored, so that a whole configuration of peft may be given.
        seed: Of the adapters' first values.
        dtype: Of the base. Adapters are float32, copies of whole modules are of this type, as peft has it.

    Returns:
        The model with its adapters.

    Raises:
        UserError: peft is not installed, names match nothing, or a layer cannot have an adapter.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(
            "lora: expected the package peft, which is not installed: pip install 'odc_mpi[lora]', or leave lora out"
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


class AdapterWeights:
    """First values of a model with adapters: a `shard.local_shards.WeightSource`.

    An adapter is seeded by the seed and its name, so that its values do not depend on the number of ranks.
    """

    def __init__(self, base: WeightSource, module: nn.Module, seed: int) -> None:
        self._base = base
        self._seed = seed
        self._shapes = {name: tuple(p.shape) for name, p in module.named_parameters() if is_adapter(name)}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`."""
        if not is_adapter(name):
            return self._base.read(base_name(name), start, stop)
        whole = torch.zeros(self._shapes[name])
        if ".lora_A." in name:
            digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)  # as peft does
        return whole.view(-1)[start:stop]


def is_adapter(name: str) -> bool:
    """Return whether a parameter is a matrix of an adapter, by its dotted name."""
    return ".lora_" in name


def is_trained(name: str) -> bool:
    """Return whether a parameter is of an adapter, or of the trained copy of a whole module."""
    return is_adapter(name) or ".modules_to_save." in name


def peft_name(name: str) -> str:
    """Return the name of a trained parameter in adapter_model.safetensors, without the adapter's own name."""
    return _PREFIX + (name.replace(f".{ADAPTER}.", ".") if is_adapter(name) else base_name(name))


def base_name(name: str) -> str:
    """Return the name that a parameter has in the model without adapters."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _check_names(module: transformers.PreTrainedModel, targets: str | Collection[str], saved: Collection[str]) -> None:
    """Refuse names that match no module, layers that are not linear, and tied embeddings."""
    modules = {name: m for name, m in module.named_modules() if name}
    linear = [name for name, m in modules.items() if isinstance(m, nn.Linear)]
    chosen = {} if isinstance(targets, str) else {target: _matching(modules, target) for target in targets}
    for target, found in chosen.items():
        _require_found("lora.target_modules", target, found, linear)
        other = next((name for name in found if name not in linear), None)
        if other:
            raise UserError(
                f"lora.target_modules: expected names of linear layers, got {target}, which is a "
                f"{type(modules[other]).__name__}: choose among {_last_parts(linear)}"
            )
    owners = [name for name, m in modules.items() if any(True for _ in m.parameters(recurse=False))]
    saved_modules = {name: _matching(modules, name) for name in saved}
    for name, found in saved_modules.items():
        _require_found("lora.modules_to_save", name, found, owners)
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if head is not None and head.weight is embedding.weight:
        for setting, names in (("target_modules", chosen), ("modules_to_save", saved_modules)):
            for requested, found in names.items():
                if any(modules[name] in (embedding, head) for name in found):
                    raise UserError(
                        f"lora.{setting}: {requested} shares its weights between embedding and head, which cannot be "
                        "adapted apart: leave it out"
                    )


def _matching(modules: Collection[str], target: str) -> list[str]:
    return [name for name in modules if name == target or name.endswith(f".{target}")]


def _require_found(setting: str, requested: str, found: Collection[str], known: Collection[str]) -> None:
    if not found:
        raise UserError(f"{setting}: no module is named {requested}, expected some of {_last_parts(known)}")


def _last_parts(names: Collection[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))


def _as_json(config: Any) -> dict[str, Any]:
    """Return the content of peft's adapter_config.json."""
    content = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    content["peft_type"] = "LORA"
    return content | {"inference_mode": True}

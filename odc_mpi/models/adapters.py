"""LoRA adapters: small trainable matrices that peft adds to the weights of a frozen base model.

peft modifies the model on the meta device, so no memory is allocated for parameters. The result is the
transformers model with the parameter names of peft:

    ...q_proj.base_layer.weight               base weight, frozen
    ...q_proj.lora_A.default.weight           adapter, Kaiming-uniform; the seed is derived from `seed` and this name
    ...q_proj.lora_B.default.weight           adapter, initialized to zero
    ...experts.base_layer.gate_up_proj        fused experts, frozen; one `base_layer` per adapted parameter
    ...experts.lora_A.default.weight          adapters of all fused experts, concatenated in the order of the experts
    lm_head.original_module.weight            weight of a module in `modules_to_save`, frozen
    lm_head.modules_to_save.default.weight    trainable copy of this weight
"""

import hashlib
import math
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any, cast

import torch
import transformers
from torch import nn
from typing_extensions import override

from odc_mpi.errors import UserError, one_line_message
from odc_mpi.models.build import MetaModel
from odc_mpi.models.heads import prediction_task
from odc_mpi.models.weights.base_check import HashedWeights
from odc_mpi.shard.local_shards import WeightSource

#: Default adapter name in peft, which is a component of parameter names.
ADAPTER = "default"
#: Components that peft inserts into the names of base parameters.
_WRAPPERS = {"base_layer", "original_module", "modules_to_save", ADAPTER}
#: Prefix of the parameter names in adapter_model.safetensors.
_PREFIX = "base_model.model."
#: Supported settings of peft's `LoraConfig`. Those in `OPTIONAL_SETTINGS` may be missing from adapter_config.json.
SETTINGS = ("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save")
OPTIONAL_SETTINGS = (
    *("target_parameters", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
    "exclude_modules",
)
#: Pattern that matches a dotted name up to the layer number, as in peft.
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")


def add_adapters(meta_model: MetaModel, settings: Mapping[str, Any], seed: int, dtype: torch.dtype) -> MetaModel:
    """Add LoRA adapters to a model on the meta device, and return the model with a source of all its weights.

    Only the adapters and the copies of the modules in `modules_to_save` are trainable. The new head of a reward model
    is added to `modules_to_save`. Raises `UserError` if peft is not installed, a name in `settings` matches no module
    or parameter, a layer does not exist, or a module cannot be adapted.

    Args:
        meta_model: Base model. Its module is modified in place.
        settings: Settings for peft's `LoraConfig`, or the content of adapter_config.json. Must contain all `SETTINGS`,
            and may contain `OPTIONAL_SETTINGS`. Other entries are ignored.
        seed: Seed for the initial adapter weights.
        dtype: Dtype of the base parameters and, as in peft, of the copies in `modules_to_save`. Adapters are float32.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(
            "lora: requires the package peft, which is not installed: pip install 'odc_mpi[lora]', or remove lora"
        ) from error
    module = meta_model.module
    task = prediction_task(type(module).__name__)
    if task.new_head:
        settings = {**settings, "modules_to_save": sorted({*(settings["modules_to_save"] or ()), task.new_head})}
    _check_names(module, settings)
    _check_layers(module, settings, meta_model.num_layers)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    arguments = {name: settings[name] for name in (*SETTINGS, *OPTIONAL_SETTINGS) if settings.get(name) is not None}
    if settings["target_modules"] == "all-linear" and (routers := _find_routers(module)):
        arguments["exclude_modules"] = routers
    try:
        config = LoraConfig(task_type=task.peft_type, **arguments)
        with warnings.catch_warnings():
            # peft derives patterns for fused experts, and then finds no module for them, only parameters.
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
            inject_adapter_in_model(config, module, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    except Exception as error:  # peft refuses with exceptions of many kinds
        text = one_line_message(error)
        if "lora_dropout" in text:
            text = f"it has no dropout for fused experts: set lora.dropout to 0, got {settings['lora_dropout']}"
        raise UserError(f"lora: peft cannot adapt {type(module).__name__}: {text}") from error
    add_in_forward(module)
    adapter = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    adapter |= {"peft_type": "LORA", "inference_mode": True}
    weights, base = AdapterWeights(meta_model.weights, module, seed), cast(HashedWeights, meta_model.weights)
    return replace(meta_model, weights=weights, adapter=adapter, base=base)


def add_in_forward(module: nn.Module) -> None:
    """Replace the `forward` methods of peft layers for `target_parameters` so that they support sharded models.

    The original methods parametrize the adapted parameter, which is not possible if parameters are fetched on access.
    The new methods add the adapter to the weight. Call this function before `shard_model`.
    """
    for layer in module.modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "parameter_name"):
            layer.forward = MethodType(_adapted_forward, layer)


def _adapted_forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
    if layer.disable_adapters:
        return layer.base_layer(*args, **kwargs)
    owner, name = layer.get_base_layer(), layer.parameter_name
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    # An attribute of the instance hides the parameter of the same name. `setattr` would refuse it.
    vars(owner)[name] = add_product(layer, getattr(owner, name), a, b)
    try:
        return layer.base_layer(*args, **kwargs)
    finally:
        del vars(owner)[name]


def add_product(layer: Any, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return `weight + alpha / r * B @ A` in the dtype of `weight`. Each fused expert is computed separately.

    Args:
        layer: peft layer that adapts the weight.
        weight: Base parameter, `[out, in]`, or `[experts, out, in]` (`[experts, in, out]` in transposed modules).
        a: Matrix A, `[experts * r, in]`. Each expert's `r` rows are consecutive.
        b: Matrix B, `[out, r * experts]`. Column `i * experts + e` is column `i` of expert `e`'s matrix B.
    """
    num_experts = weight.shape[0] if weight.ndim == 3 else 1
    down = a.to(weight.dtype).view(num_experts, -1, a.shape[-1])
    up = b.to(weight.dtype).view(b.shape[0], -1, num_experts).permute(2, 0, 1)
    left, right = (down.mT, up.mT) if getattr(layer.get_base_layer(), "is_transposed", False) else (up, down)
    stacked = weight.view(num_experts, *weight.shape[-2:])
    return torch.baddbmm(stacked, left, right, alpha=layer.scaling[ADAPTER]).view(weight.shape)


def adapted_layers(module: nn.Module) -> dict[str, str]:
    """Map the names of adapted parameters in the base model to the names of their peft layers in `module`."""
    return {
        base_name(f"{name}.{getattr(layer, 'parameter_name', 'weight')}"): name
        for name, layer in module.named_modules()
        if hasattr(layer, "lora_A")
    }


def left_out(module: transformers.PreTrainedModel) -> list[str]:
    """Return the distinct names of weights without an adapter, with layer prefixes (``model.layers.0.``) removed.

    Embeddings, the head, biases, one-dimensional parameters and modules that are trained in full are omitted.
    """
    head = module.get_output_embeddings()
    trained = adapted_layers(module).keys() | {base_name(n) for n, p in module.named_parameters() if is_trained(n)}
    names = [
        base_name(f"{name}.{key}")
        for name, submodule in module.named_modules()
        if submodule is not head and not isinstance(submodule, nn.Embedding) and ".lora_" not in name
        for key, parameter in submodule.named_parameters(recurse=False)
        if parameter.ndim >= 2 and not key.endswith("bias")
    ]
    return list(dict.fromkeys(_LAYER.sub("", name) for name in names if name not in trained))


class AdapterWeights(WeightSource):
    """Source of the initial weights of a model with adapters. `base` is the source of the base model's weights.

    The values of an adapter matrix depend only on `seed` and on the name of the matrix, not on the number of ranks.
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
    """Return True if `name` is the dotted name of an adapter matrix."""
    return ".lora_" in name


def is_trained(name: str) -> bool:
    """Return True if `name` is the dotted name of an adapter matrix or of a parameter in a trainable module copy."""
    return is_adapter(name) or ".modules_to_save." in name


def peft_name(name: str) -> str:
    """Convert the name of a trainable parameter to its name in adapter_model.safetensors."""
    return _PREFIX + (name.replace(f".{ADAPTER}.", ".") if is_adapter(name) else base_name(name))


def base_name(name: str) -> str:
    """Convert the name of a base parameter to its name in the model without adapters."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _check_names(module: transformers.PreTrainedModel, settings: Mapping[str, Any]) -> None:
    """Raise `UserError` for names that match nothing, targets that peft cannot adapt, and tied embeddings."""
    modules = {name: m for name, m in module.named_modules() if name}
    parameters = {name: p for name, p in module.named_parameters() if p.ndim in (2, 3)}
    routers = set(_find_routers(module)).difference(settings.get("exclude_modules") or ())
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


def _find_routers(module: nn.Module) -> list[str]:
    """Return the names of linear layers whose class overrides `nn.Linear.forward`, such as the routers of Llama 4.

    peft cannot adapt these layers correctly, because they return more than the product of the input and the weight.
    """
    linear = ((name, m) for name, m in module.named_modules() if isinstance(m, nn.Linear))
    return [name for name, m in linear if type(m).forward is not nn.Linear.forward]


def _check_layers(module: nn.Module, settings: Mapping[str, Any], num_layers: int) -> None:
    """Raise `UserError` for layers that do not exist or settings to which peft does not apply `layers_to_transform`."""
    if (layers := settings.get("layers_to_transform")) is None:
        return
    layers = [layers] if isinstance(layers, int) else layers
    if missing := [layer for layer in layers if not 0 <= layer < num_layers]:
        raise UserError(f"lora.layers_to_transform: expected layers from 0 to {num_layers - 1}, got {missing[0]}")
    if isinstance(settings["target_modules"], str):
        linear = [name for name, m in module.named_modules() if isinstance(m, nn.Linear) and _LAYER.match(name)]
        raise UserError(
            "lora.layers_to_transform: expected names in lora.target_modules, got "
            f"{settings['target_modules']}: choose among {_last_parts(linear)}"
        )
    names = [name for name, _ in module.named_parameters()]
    for target, matched in _match("target_parameters", names, settings.get("target_parameters") or (), names).items():
        for name in matched:
            if (match := _LAYER.match(name)) is None or int(match[1]) not in layers:
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

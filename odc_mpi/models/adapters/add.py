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
import warnings
from collections.abc import Mapping
from dataclasses import replace
from types import MethodType
from typing import Any, cast

import torch
import transformers
from torch import nn
from typing_extensions import override

from odc_mpi.errors import UserError, one_line_message
from odc_mpi.models.adapters.check import LAYER, HashedWeights, check_layers, check_names, find_routers
from odc_mpi.models.build import MetaModel
from odc_mpi.models.heads import prediction_task
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
    check_names(module, settings)
    check_layers(module, settings, meta_model.num_layers)
    for parameter in filter(torch.is_floating_point, module.parameters()):
        parameter.data = parameter.data.to(dtype)
    arguments = {name: settings[name] for name in (*SETTINGS, *OPTIONAL_SETTINGS) if settings.get(name) is not None}
    if settings["target_modules"] == "all-linear" and (routers := find_routers(module)):
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
    return list(dict.fromkeys(LAYER.sub("", name) for name in names if name not in trained))


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

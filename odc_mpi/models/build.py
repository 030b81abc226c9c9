"""Construction of transformers models on the meta device, together with sources of their weights.

A model is built from a configuration with random weights (`model.config`), or from a local directory with safetensors
files (`model.path`). Each rank later reads only its slices of the parameters from the `WeightSource`, so no rank holds
the full model. In all functions, `attn_implementation` selects the attention within each packed sequence ("sdpa" or
"eager"), `task` is the prediction task of the model, and `seed` determines randomly initialized weights.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers

from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.data.plan.cost import CostModel, flops_cost
from odc_mpi.errors import UserError, one_line_message
from odc_mpi.files import parse_json
from odc_mpi.formatting import did_you_mean
from odc_mpi.models import attention
from odc_mpi.models.adapters.check import HashedWeights
from odc_mpi.models.configuration import decode_floats, flatten_config, override_config
from odc_mpi.models.families import Packing, build_for_training
from odc_mpi.models.heads import CAUSAL_LM, Task
from odc_mpi.models.quantization.stored import replace_stored, take_quantization
from odc_mpi.models.quirks.composite import find_composite, text_model_type
from odc_mpi.models.weights.random_init import RandomInitWeights, uninitialized_buffers
from odc_mpi.models.weights.safetensors_files import DirectoryTensors, SafetensorsWeights
from odc_mpi.shard.local_shards import WeightSource

#: File name that transformers uses.
_CONFIG = "config.json"
#: Maximum number of layers per model, and of experts per layer. Building a module takes time even without parameters.
_MAX_MODULES = 10_000
_COUNTS = re.compile(r"(^|\.)(n|num)_(\w+_)?(layers?|experts)$")


@dataclass
class MetaModel:
    """Language model or reward model with parameters on the meta device, and the source of its weights.

    Attributes:
        module: The model, with its buffers in host memory.
        vocab_size: Number of rows in the embedding.
        flops: Cost model that returns the FLOPs for training on a sequence if all parameters are trainable.
        adapter: Content of adapter_config.json, or None for a model without adapters.
        base: Source of the base model's weights, or None for a model without adapters.
        checkpoint: Adapter checkpoint from which training starts, or None.
        quantization: Settings of the 4-bit weights, or None. With the version of `bitsandbytes` if it quantizes them.
    """

    module: transformers.PreTrainedModel
    weights: WeightSource
    vocab_size: int
    num_layers: int
    flops: CostModel
    packing: Packing
    adapter: dict[str, Any] | None = None
    base: HashedWeights | None = None
    checkpoint: Checkpoint | None = None
    quantization: dict[str, Any] | None = None


def from_config(
    settings: Mapping[str, Any], seed: int, attn_implementation: str = "sdpa", task: Task = CAUSAL_LM
) -> MetaModel:
    """Build a model from `settings`, with random weights that depend on `seed` but not on the number of ranks.

    `settings` is the value of `model.config`. Raises `UserError` if its `model_type` is missing or unknown, if
    transformers does not accept a setting, or if the model is multimodal or cannot be trained.
    """
    model = _with_random_weights(_make_config(settings), "model.config", attn_implementation, task, seed)[0]
    _require_buffers(model.module, "model.config")
    return model


def from_saved_config(
    content: Mapping[str, Any],
    attn_implementation: str = "sdpa",
    overrides: Mapping[str, Any] | None = None,
    task: Task = CAUSAL_LM,
    seed: int = 0,
) -> MetaModel:
    """Build a model with random weights from a checkpoint's configuration.

    `content` is the saved `full_configuration`. The caller must replace the random weights. For `overrides`, see
    `from_directory`. Raises `UserError` if the installed transformers cannot use the configuration.
    """
    settings = {
        key: decode_floats(value) for key, value in content.items() if not key.startswith("_") and key != "model_type"
    }
    with _user_errors("the checkpoint's configuration is not usable"):
        config = transformers.AutoConfig.for_model(content["model_type"], **settings)
    config = _override(config, settings, overrides)
    return _with_random_weights(config, "the checkpoint", attn_implementation, task, seed)[0]


def is_model_directory(path: Path) -> bool:
    """Return True if `path` contains config.json, as Hugging Face model directories do."""
    return (path / _CONFIG).is_file()


def from_directory(
    path: Path,
    attn_implementation: str = "sdpa",
    overrides: Mapping[str, Any] | None = None,
    task: Task = CAUSAL_LM,
    seed: int = 0,
) -> MetaModel:
    """Build the model in a Hugging Face directory, or only its text model if it is multimodal.

    The weights are read from the safetensors files. If they lack the head for `task`, it is initialized randomly.
    `overrides`, the value of `model.config`, contains transformers settings that replace those in config.json. Raises
    `UserError` if a file or parameter is missing or cannot be used, a shape does not match the configuration, or the
    model cannot be trained.
    """
    if not is_model_directory(path):
        raise UserError(
            f"model.path: expected a Hugging Face model directory with {_CONFIG}, or a run with checkpoints, "
            f"{path} has none"
        )
    problem = f"model.path: {path / _CONFIG} is not usable"
    with _user_errors(problem):
        content = decode_floats(parse_json((path / _CONFIG).read_bytes()))
        if not isinstance(content, dict):
            raise ValueError(f"expected a JSON object, got {content!r}")
        _check_counts(content, "", f"{problem}: ")
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        config = _override(config, content, overrides)
        composite = find_composite(config)
    config = composite.text_config if composite else config
    is_quantized = composite is None and take_quantization(config, "model.path")
    model, random = _with_random_weights(config, "model.path", attn_implementation, task, seed)
    quantization = replace_stored(model.module, DirectoryTensors(path)) if is_quantized else None
    weights = SafetensorsWeights(path, model.module, composite, random, task.new_head)
    weights.load_buffers(model.module)
    _require_buffers(model.module, "model.path")
    return replace(model, weights=weights, quantization=quantization)


def _override(
    config: transformers.PreTrainedConfig, content: Mapping[str, Any], overrides: Mapping[str, Any] | None
) -> transformers.PreTrainedConfig:
    if not overrides:
        return config
    _check_counts(overrides, "model.config.")
    with _user_errors("model.config: transformers does not accept it"):
        return cast(transformers.PreTrainedConfig, override_config(config, content, overrides))


@contextmanager
def _user_errors(prefix: str) -> Iterator[None]:
    """Context manager that converts all exceptions to `UserError`, since transformers raises many kinds."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        key = "there is no " if isinstance(error, KeyError) else ""
        raise UserError(f"{prefix}: {key}{one_line_message(error)}") from error


def _with_random_weights(
    config: transformers.PreTrainedConfig, setting: str, attn_implementation: str, task: Task, seed: int
) -> tuple[MetaModel, RandomInitWeights]:
    module, packing = _on_meta(config, setting, attn_implementation, task)
    weights = RandomInitWeights(module, seed)
    with _user_errors("model: the buffers cannot be initialized, lower the sizes in the configuration"):
        weights.init_buffers()
    config = module.config.get_text_config()
    embedding = cast(torch.Tensor, module.get_input_embeddings().weight)
    head = module.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    # The embedding is used in a matrix product only if it is tied to the head.
    numel = sum(parameter.numel() for parameter in module.parameters()) - (0 if tied else embedding.numel())
    settings = config.to_dict()  # Gemma 4 refuses attributes that differ between layers
    num_heads = settings.get("num_attention_heads") or 1  # a state-space model has none
    with _user_errors(f"model: {type(module).__name__} is not supported"):
        size = num_heads * (settings.get("head_dim") or config.hidden_size // num_heads)
        num_layers = config.num_hidden_layers
    flops = flops_cost(numel, num_layers, size)
    return MetaModel(module, weights, embedding.shape[0], num_layers, flops, packing), weights


def _require_buffers(module: transformers.PreTrainedModel, setting: str) -> None:
    if names := uninitialized_buffers(module):
        raise UserError(
            f"{setting}: {type(module).__name__} is not supported: its buffer {names[0]} is neither stored nor "
            "initialized by the modules of the model"
        )


def _check_counts(settings: Mapping[str, Any], prefix: str, source: str = "") -> None:
    for key, value in flatten_config(settings, prefix).items():
        if _COUNTS.search(key) and isinstance(value, int) and value > _MAX_MODULES:
            raise UserError(f"{source}{key}: expected at most {_MAX_MODULES}, got {value}")


def _make_config(settings: Mapping[str, Any]) -> transformers.PreTrainedConfig:
    """Create a configuration. Raise `UserError` for unknown keys, which transformers would silently accept."""
    settings = dict(settings)
    kind = settings.pop("model_type", None)
    if kind is None:
        raise UserError("model.config: expected the key model_type, such as qwen2")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise UserError(
            f"model.config.model_type: transformers knows no {kind!r}"
            + did_you_mean(str(kind), transformers.CONFIG_MAPPING, ": {}")
        )
    with _user_errors(f"model.config.model_type: transformers has no default {kind} configuration"):
        default = transformers.AutoConfig.for_model(kind)
    _check_counts(settings, "model.config.")
    with _user_errors("model.config: transformers does not accept it"):
        config = override_config(default, {}, settings)
        if config.get_text_config() is not config:
            hint = f": set it to {text_model_type(config)}"
            raise UserError(f"model.config.model_type: {kind} is multimodal{hint}")
    return config


def _on_meta(
    config: transformers.PreTrainedConfig, setting: str, attn_implementation: str, task: Task
) -> tuple[transformers.PreTrainedModel, Packing]:
    attention.register()
    config.use_cache = False
    with _user_errors(f"{setting}: transformers does not accept it"):
        values = config.to_dict()
    for key, value in values.items():
        if ("dropout" in key or "pdrop" in key) and type(value) in (int, float) and not 0 <= value <= 1:
            raise UserError(f"{setting}: expected {key} from 0 to 1, got {value}")  # torch finds it in the first step
    if getattr(config, "quantization_config", None):
        raise UserError(f"{setting}: the weights are quantized, expected float32, bfloat16 or float16")

    def build(implementation: str | None) -> transformers.PreTrainedModel:
        with torch.device("meta"), _user_errors(f"{setting}: transformers cannot build a {task.description} from it"):
            return task.build(config, setting, attn_implementation=implementation, dtype=torch.float32)

    return build_for_training(build, setting, attn_implementation)

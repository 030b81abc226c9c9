"""transformers models: built without memory for their parameters, which are read slice by slice.

A model comes from a configuration (`model.config`; parameters drawn from the seed) or from a local directory with
safetensors (`model.path`). In both cases the module is built on the meta device, and this rank's slices are read later
through a `shard.local_shards.WeightSource`: no rank ever holds the whole model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers

from odc_mpi.errors import UserError, one_line_message
from odc_mpi.formatting import did_you_mean
from odc_mpi.models import attention
from odc_mpi.models.weights import HashedWeights, RandomInitWeights, SafetensorsWeights
from odc_mpi.shard.local_shards import WeightSource

#: transformers' own file name.
_CONFIG = "config.json"
#: Configurations of models that were tried on packed sequences: a trial takes longer than making the model.
_TRIED: set[str] = set()


@dataclass
class MetaModel:
    """A causal language model with parameters on the meta device, and the source of their values.

    Attributes:
        module: The model; its buffers are real.
        weights: Source of the parameters' values.
        vocab_size: Tokens that its embedding knows.
        num_matmul_params: Parameters that a token is multiplied with: all but an embedding that only looks up.
        num_layers: Layers with attention.
        attention_dim: Attention heads times their dimension.
        adapter: The content of peft's adapter_config.json; None for a model without adapters.
        base: Source of the values of the model without its adapters; None for a model without adapters.
    """

    module: transformers.PreTrainedModel
    weights: WeightSource
    vocab_size: int
    num_matmul_params: int
    num_layers: int
    attention_dim: int
    adapter: dict[str, Any] | None = None
    base: HashedWeights | None = None


def from_config(settings: Mapping[str, Any], seed: int, attn_implementation: str = "sdpa") -> MetaModel:
    """Build a model with random weights, the same for a seed on any number of ranks.

    Args:
        settings: A transformers configuration, `model_type` included.
        seed: Seed of the random weights.
        attn_implementation: Attention within each packed sequence, "sdpa" or "eager".

    Raises:
        UserError: Unknown `model_type` or setting, or a model that cannot work on packed sequences.
    """
    module = _on_meta(_make_config(settings), "model.config", attn_implementation)
    weights = RandomInitWeights(module, seed)
    weights.init_buffers()
    return _to_meta_model(module, weights)


def from_saved_config(content: Mapping[str, Any], attn_implementation: str = "sdpa") -> MetaModel:
    """Build the model of a checkpoint; its weights are meant to be replaced.

    Args:
        content: What `to_json_string` of a transformers configuration has.
        attn_implementation: Attention within each packed sequence, "sdpa" or "eager".

    Raises:
        UserError: This version of transformers does not take it.
    """
    settings = {key: value for key, value in content.items() if not key.startswith("_") and key != "model_type"}
    try:
        config = transformers.AutoConfig.for_model(content["model_type"], **settings)
    except Exception as error:  # transformers validates with exceptions of many kinds
        raise UserError(f"the checkpoint's configuration is not usable: {one_line_message(error)}") from error
    module = _on_meta(config, "the checkpoint", attn_implementation)
    weights = RandomInitWeights(module, seed=0)
    weights.init_buffers()
    return _to_meta_model(module, weights)


def is_model_directory(path: Path) -> bool:
    """Return whether a path is a Hugging Face directory of a model."""
    return (path / _CONFIG).is_file()


def from_directory(path: Path, attn_implementation: str = "sdpa") -> MetaModel:
    """Build a model with the weights of a Hugging Face directory.

    Args:
        path: Directory with config.json and safetensors files.
        attn_implementation: Attention within each packed sequence, "sdpa" or "eager".

    Raises:
        UserError: A file or parameter is missing, or a parameter has another shape than in the configuration.
    """
    if not is_model_directory(path):
        raise UserError(f"model.path: expected a Hugging Face model directory with {_CONFIG}, {path} has none")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers validates with exceptions of many kinds
        raise UserError(f"model.path: {path / _CONFIG} is not usable: {one_line_message(error)}") from error
    module = _on_meta(config, "model.path", attn_implementation)
    weights = SafetensorsWeights(path, module)
    RandomInitWeights(module, seed=0).init_buffers()
    weights.load_buffers(module)
    return _to_meta_model(module, weights)


def _to_meta_model(module: transformers.PreTrainedModel, weights: WeightSource) -> MetaModel:
    config = module.config.get_text_config()
    embedding = cast(torch.Tensor, module.get_input_embeddings().weight)
    head = module.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    numel = sum(parameter.numel() for parameter in module.parameters()) - (0 if tied else embedding.numel())
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = config.num_attention_heads * head_size
    return MetaModel(module, weights, embedding.shape[0], numel, config.num_hidden_layers, size)


def _make_config(settings: Mapping[str, Any]) -> transformers.PreTrainedConfig:
    """Make a configuration; refuse unknown keys, which transformers itself would keep silently."""
    settings = dict(settings)
    kind = settings.pop("model_type", None)
    if kind is None:
        raise UserError("model.config: expected the key model_type, such as qwen2")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise UserError(
            f"model.config.model_type: transformers knows no {kind!r}"
            + did_you_mean(str(kind), transformers.CONFIG_MAPPING, ": {}")
        )
    try:
        default = transformers.AutoConfig.for_model(kind)
    except Exception as error:  # some families have no default configuration
        raise UserError(
            f"model.config.model_type: transformers makes no {kind} alone: {one_line_message(error)}"
        ) from error
    known = [*default.to_dict(), *default.attribute_map]
    unknown = next((key for key in settings if key not in known), None)
    if unknown is not None:
        hint = did_you_mean(str(unknown), known, ": {}")
        raise UserError(f"unknown setting model.config.{unknown} for model_type {kind}{hint}")
    try:
        return transformers.AutoConfig.for_model(kind, **settings)
    except Exception as error:  # transformers validates with exceptions of many kinds
        raise UserError(f"model.config: transformers does not take it: {one_line_message(error)}") from error


def _on_meta(
    config: transformers.PreTrainedConfig, setting: str, attn_implementation: str
) -> transformers.PreTrainedModel:
    attention.register()
    config.use_cache = False
    foreign = set(getattr(config, "layer_types", None) or ()) - attention.PACKABLE_LAYER_TYPES
    if foreign:
        raise UserError(f"{setting}: layers of type {', '.join(sorted(foreign))} carry state across packed sequences")
    try:
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(
                config,
                attn_implementation=attention.IMPLEMENTATIONS[attn_implementation],
                trust_remote_code=False,
                dtype=torch.float32,
            )
    except Exception as error:  # a wrong configuration shows in a constructor, as any kind of exception
        raise UserError(
            f"{setting}: transformers cannot build a causal model from it: {one_line_message(error)}"
        ) from error
    if not module._supports_attention_backend:
        raise UserError(
            f"{setting}: {type(module).__name__} takes no attention function, by which packed sequences are kept apart"
        )
    if getattr(config, "quantization_config", None):
        raise UserError(f"{setting}: the weights are quantised, expected float32, bfloat16 or float16")
    attempt_key = f"{attn_implementation} {config.to_json_string(use_diff=False)}"
    if attempt_key not in _TRIED:
        _require_packing(module, setting)
        _TRIED.add(attempt_key)
    return module


def _require_packing(module: transformers.PreTrainedModel, setting: str) -> None:
    try:
        _try_packed(module)
    except attention.PackingUnsupportedError as error:
        raise UserError(f"{setting}: {type(module).__name__} cannot keep packed sequences apart: {error}") from error
    except Exception as error:  # a wrong configuration shows in a forward, as any kind of exception
        if not _is_trial_artifact(error):
            raise UserError(
                f"{setting}: {type(module).__name__} is built from it and cannot run: {one_line_message(error)}"
            ) from error


def _try_packed(module: transformers.PreTrainedModel) -> None:
    """Run two sequences of two tokens through a model on the meta device, which computes nothing but shapes.

    Raises:
        UnpackableError: The model asks for attention that packed sequences cannot be given.
        Exception: Any other, if the model's parts do not fit each other, or if the meta device is not enough.
    """
    tokens = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    bounds = torch.tensor([0, 2, 4], dtype=torch.int32)
    # The mask of ones keeps transformers from looking for sequences in the positions, which have no values here.
    inputs = {"input_ids": tokens, "position_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    module(**inputs, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, use_cache=False)


def _is_trial_artifact(error: Exception) -> bool:
    """Return whether a model that failed on the meta device may still work on a real one.

    A router of experts reads values, which the meta device does not have, and torch's grouped matrix product refuses
    types there that it takes on a processor.
    """
    words = ("meta tensor", "meta device", "'meta'", "data-dependent", "dtype")
    return isinstance(error, NotImplementedError) or any(word in str(error).lower() for word in words)

"""Text models of multimodal (composite) models. The parameters of vision and audio towers are not read."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers

from odc_mpi.errors import UserError

#: Settings of language models that replace the text parts of multimodal models, keyed by the types of the text parts,
#: for which transformers has no language model class. For text, where the rotary positions are equal in all three
#: dimensions, the outputs are the same.
_EQUIVALENT: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": {"model_type": "qwen2"},
    "qwen2_5_vl_text": {"model_type": "qwen2"},
    "qwen3_vl_text": {"model_type": "qwen3"},
    "qwen3_vl_moe_text": {"model_type": "qwen3_moe", "norm_topk_prob": True},  # it always normalizes
}


@dataclass
class Composite:
    """Multimodal model `module` on the meta device, and the configuration of its text model.

    `text_config` configures a causal language model with the same parameters as the text part of `module`.
    """

    module: transformers.PreTrainedModel
    text_config: transformers.PreTrainedConfig

    def names(self, text: transformers.PreTrainedModel) -> dict[str, str]:
        """Map the names of parameters and buffers in the text model `text` to their names in the multimodal model."""
        kind = self.module.config.get_text_config().model_type
        submodules = self.module.named_modules()
        place, part = next(
            (name, submodule)
            for name, submodule in submodules
            if name and isinstance(submodule, transformers.PreTrainedModel) and submodule.config.model_type == kind
        )
        prefix = "" if part.get_output_embeddings() is not None else f"{text.base_model_prefix}."
        return {
            name: f"{place}.{name.removeprefix(prefix)}" if name.startswith(prefix) else name
            for name in text.state_dict()
        }


def text_model_type(config: transformers.PreTrainedConfig) -> str:
    """Return the `model_type` of the causal language model for the text part of a multimodal configuration."""
    kind: str = config.get_text_config().model_type
    return str(_EQUIVALENT.get(kind, {}).get("model_type", kind))


def find_composite(config: transformers.PreTrainedConfig) -> Composite | None:
    """Build the multimodal model of `config` on the meta device. Return None if `config` is not multimodal.

    Raises `UserError` if transformers has no class for the multimodal model, or no language model for its text part.
    """
    inner = config.get_text_config()
    if inner is config:
        return None
    problem = None
    if type(inner) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and inner.model_type not in _EQUIVALENT:
        problem = f"transformers has no causal language model for its text part, {inner.model_type}"
    elif type(config) not in transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING:
        problem = "transformers has no class for it that generates text (AutoModelForMultimodalLM)"
    if problem is not None:
        raise UserError(f"model.path: {config.model_type} is multimodal, and {problem}")
    with torch.device("meta"):
        module = transformers.AutoModelForMultimodalLM.from_config(config, trust_remote_code=False, dtype=torch.float32)
    settings: dict[str, Any] = {key: value for key, value in inner.to_dict().items() if not key.startswith("_")}
    if equivalent := _EQUIVALENT.get(inner.model_type):
        known = transformers.AutoConfig.for_model(equivalent["model_type"]).to_dict()
        settings = {key: value for key, value in settings.items() if key in known} | equivalent
        rope = settings["rope_parameters"]
        settings["rope_parameters"] = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    output = module.get_output_embeddings()
    settings["tie_word_embeddings"] = output.weight is module.get_input_embeddings().weight
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        settings["quantization_config"] = quantization
    return Composite(module, transformers.AutoConfig.for_model(settings.pop("model_type"), **settings))

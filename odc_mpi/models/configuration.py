"""Changes to transformers configurations through `model.config`, and comparison of a model with a checkpoint.

This module does not import torch, so that an invalid setting is reported before torch is imported.
"""

import copy
import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from odc_mpi.errors import UserError
from odc_mpi.formatting import did_you_mean

#: Configuration keys that do not affect the output of a model.
_INCIDENTAL = {
    *("dtype", "torch_dtype", "use_cache", "transformers_version", "_name_or_path", "architectures"),
    *("id2label", "label2id", "bos_token_id", "eos_token_id", "initializer_range"),
    *("output_attentions", "output_hidden_states", "return_dict"),
}

#: Supported values of `attn_implementation`, and reasons for rejecting values that begin with a prefix.
ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")
_UNSUPPORTED = {
    "flash_attention": "a library for GPUs that odc_mpi does not call: sdpa uses the FlashAttention kernels of PyTorch "
    "for each packed sequence where possible",
    "flex_attention": "torch has no backward of it on a CPU, and odc_mpi does not call it on a GPU: use sdpa",
    "paged|": "it is for generation with a paged cache, not for packed sequences: use sdpa",
    "kernels-community/": "odc_mpi loads no kernels from the Hub: use sdpa",
}


def unsupported_reason(name: object) -> str:
    """Return the reason for rejecting an attention implementation in the form " (REASON)", or "" if none is known."""
    reasons = (reason for prefix, reason in _UNSUPPORTED.items() if isinstance(name, str) and name.startswith(prefix))
    return next((f" ({reason})" for reason in reasons), "")


def override_config(config: Any, content: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """Return a copy of a transformers configuration with some settings replaced.

    Settings that the configuration class derives from the replaced ones are derived again. Raises `UserError` if a
    setting is unknown, or if a value has no effect because other settings override it.

    Args:
        config: Configuration that transformers created from `content`, the content of config.json.
        overrides: New values, keyed by setting name. A nested mapping replaces only the entries that it contains.
    """
    settings = _standard_names(config, overrides)
    changed = type(config).from_dict(_merge(config, content, settings, "model.config."))
    values = flatten_config(json.loads(changed.to_json_string(use_diff=False)))
    unused = _unused_rotary_settings(changed) | _unused_rotary_settings(changed.get_text_config())
    for key, value in flatten_config(settings).items():
        taken = values.get(key)
        ignored = "rope_parameters." in key and not unused.isdisjoint(key.split("."))
        per_layer = isinstance(taken, list) and taken == [value] * len(taken)
        if value is not None and (ignored or not (per_layer or taken == value)):
            raise UserError(
                f"model.config.{key}: expected {value!r} to take effect, but other settings of {config.model_type} "
                f"{'ignore it' if ignored else f'make it {taken!r}'}: change those, too, or remove it"
            )
    return changed


def _merge(config: Any, content: Mapping[str, Any], settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    merged = {**content, "model_type": config.model_type}
    if "rope_parameters" in settings and (rope := vars(config).get("rope_parameters")):
        # In the form of transformers 5, whatever the file has, so that single entries can be replaced.
        merged["rope_parameters"] = copy.deepcopy(rope)
        merged.pop("rope_scaling", None)
    # Mixtures of experts read head_dim, although their configuration classes do not have it.
    known = [*config.to_dict(), *config.attribute_map, "head_dim"]
    for key, value in settings.items():
        if key not in known:
            of_text = hasattr(getattr(config, "text_config", None), str(key))
            hint = f": did you mean text_config.{key}?" if of_text else did_you_mean(str(key), known, ": {}")
            raise UserError(f"unknown setting {prefix}{key} for model_type {config.model_type}{hint}")
        before = vars(config).get(key)  # Gemma 4 refuses attributes that differ between layers
        if isinstance(value, Mapping) and hasattr(before, "model_type"):
            merged[key] = _merge(before, content.get(key) or {}, value, f"{prefix}{key}.")
            continue
        if isinstance(value, Mapping) and isinstance(before, Mapping) and before and key not in _INCIDENTAL:
            of_layer_types = any(isinstance(each, Mapping) for each in (*before.values(), *value.values()))
            unknown = [str(each) for each in value if each not in before]
            if unknown and (of_layer_types or key != "rope_parameters"):  # transformers checks the others
                raise UserError(
                    f"unknown setting {prefix}{key}.{unknown[0]} for model_type {config.model_type}: expected some of "
                    f"{', '.join(map(str, before))}"
                )
        merged[key] = _update(merged.get(key), value)
    return merged


def _standard_names(config: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Rename settings to their names in transformers 5, also those of a nested configuration."""
    settings = copy.deepcopy({config.attribute_map.get(key, key): value for key, value in overrides.items()})
    if "rope_scaling" in settings:
        settings["rope_parameters"] = settings.pop("rope_scaling")
    if isinstance(rope := settings.get("rope_parameters"), Mapping):
        settings["rope_parameters"] = _standard_rope(rope)
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in settings and name in (vars(config).get("rope_parameters") or {}):
            value = settings[name] if name in vars(config) else settings.pop(name)
            settings["rope_parameters"] = _update(settings.get("rope_parameters", {}), {name: value})
    for key, value in settings.items():
        if isinstance(value, Mapping) and hasattr(nested := vars(config).get(key), "model_type"):
            settings[key] = _standard_names(nested, value)
    return settings


def _standard_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rename `type` to `rope_type`, also in the entries of layer types."""
    return {
        "rope_type" if key == "type" else key: _standard_rope(value) if isinstance(value, Mapping) else value
        for key, value in rope.items()
        if key != "type" or "rope_type" not in rope
    }


def _unused_rotary_settings(config: Any) -> set[str]:
    """Return the names in `rope_parameters` that transformers does not use with its `rope_type`."""
    unused: set[str] = set()

    def check(_: str, received: set[str], required: set[str], optional_keys: Any = (), ignore_keys: Any = ()) -> None:
        unused.update(received - required - {*(optional_keys or ()), *(ignore_keys or ()), "partial_rotary_factor"})

    checked = copy.deepcopy(config)
    vars(checked)["_check_received_keys"] = check  # that of transformers only logs them
    checked.validate_rope()
    return unused


def _update(before: Any, value: Any) -> Any:
    if not (isinstance(before, Mapping) and isinstance(value, Mapping)):
        return value
    return {**before, **{key: _update(before.get(key), each) for key, each in value.items()}}


def full_configuration(module: Any) -> dict[str, Any]:
    """Return all settings of a transformers model, including defaults, as a JSON-serializable dictionary."""
    content: dict[str, Any] = json.loads(module.config.to_json_string(use_diff=False))
    return content


def first_difference(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first significant setting in which a model differs from a checkpoint.

    `metadata` is taken from the checkpoint's manifest, and `config` is the model's `full_configuration`. The result is
    the dotted name of the setting and its values in the checkpoint and in `config`, or None if no setting differs. A
    setting that only one of the two has is ignored if a different version of transformers saved the checkpoint.
    """
    theirs, ours = significant_settings(metadata["transformers_config"]), significant_settings(config)
    keys = theirs.keys() | ours.keys()
    if metadata["versions"]["transformers"] != version("transformers"):
        keys = theirs.keys() & ours.keys()  # another version may have more settings, with defaults that change nothing
    differing = (key for key in sorted(keys) if theirs.get(key) != ours.get(key))
    return next(((key, theirs.get(key), ours.get(key)) for key in differing), None)


def decode_floats(content: Any) -> Any:
    """Convert objects like ``{"__float__": "Infinity"}``, which transformers writes for infinity or NaN, to floats."""
    if isinstance(content, dict):
        if content.keys() == {"__float__"}:
            return float(content["__float__"])
        return {key: decode_floats(value) for key, value in content.items()}
    return [decode_floats(value) for value in content] if isinstance(content, list) else content


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings into a dictionary keyed by dotted names, each of which begins with `prefix`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten_config(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def significant_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a `full_configuration` that affect the output of the model, keyed by dotted name."""

    def is_significant(name: str) -> bool:
        return name not in _INCIDENTAL and not name.startswith("_attn_implementation")

    return {key: value for key, value in flatten_config(config).items() if all(map(is_significant, key.split(".")))}

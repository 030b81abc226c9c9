"""Configurations of transformers as JSON, and their comparison between a model and a checkpoint."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

#: Keys that do not affect the function that a model computes.
_INCIDENTAL = {
    *("dtype", "torch_dtype", "use_cache", "transformers_version", "_name_or_path", "architectures"),
    *("id2label", "label2id", "bos_token_id", "eos_token_id", "initializer_range"),
    *("output_attentions", "output_hidden_states", "return_dict"),
}


def full_configuration(module: Any) -> dict[str, Any]:
    """Return all settings of a transformers model, including defaults, as a JSON object."""
    content: dict[str, Any] = json.loads(module.config.to_json_string(use_diff=False))
    return content


def first_difference(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first setting that makes a model compute something different from the model of a checkpoint.

    Args:
        metadata: Metadata in the manifest of the checkpoint.
        config: Configuration of the model, from `full_configuration`.

    Returns:
        Name of the setting, value in the checkpoint and value in `config`, or None if there is no difference.
    """
    theirs, ours = _significant_settings(metadata["transformers_config"]), _significant_settings(config)
    keys = theirs.keys() | ours.keys()
    if metadata["versions"]["transformers"] != version("transformers"):
        keys = theirs.keys() & ours.keys()  # another version may have more settings, with defaults that change nothing
    differing = (key for key in sorted(keys) if theirs.get(key) != ours.get(key))
    return next(((key, theirs.get(key), ours.get(key)) for key in differing), None)


def decode_floats(content: Any) -> Any:
    """Return a JSON value with the infinite numbers that transformers writes as ``{"__float__": "Infinity"}``."""
    if isinstance(content, dict):
        if content.keys() == {"__float__"}:
            return float(content["__float__"])
        return {key: decode_floats(value) for key, value in content.items()}
    return [decode_floats(value) for value in content] if isinstance(content, list) else content


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to one mapping by dotted name. Each name begins with `prefix`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten_config(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _significant_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    significant = {
        key: _significant_settings(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _INCIDENTAL and not key.startswith("_attn_implementation")
    }
    return flatten_config(significant)

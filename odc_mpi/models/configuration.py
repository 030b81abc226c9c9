"""transformers configurations as JSON has them, and whether two are of models that compute the same."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

#: Keys that say nothing of what a model computes, or only how it is computed here.
_INCIDENTAL = {
    *("dtype", "torch_dtype", "use_cache", "transformers_version", "_name_or_path", "architectures"),
    *("id2label", "label2id", "bos_token_id", "eos_token_id", "initializer_range"),
    *("output_attentions", "output_hidden_states", "return_dict"),
}


def full_configuration(module: Any) -> dict[str, Any]:
    """Return the whole configuration of a transformers model, as JSON has it."""
    content: dict[str, Any] = json.loads(module.config.to_json_string(use_diff=False))
    return content


def first_difference(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first setting in which a model computes something else than that of a checkpoint.

    Args:
        metadata: What a checkpoint tells of its run.
        config: The whole configuration of the model at hand, as JSON has it.

    Returns:
        The setting, its value in the checkpoint and its value in `config`; None if there is no difference.
    """
    theirs, ours = _significant_settings(metadata["transformers_config"]), _significant_settings(config)
    keys = theirs.keys() | ours.keys()
    if metadata["versions"]["transformers"] != version("transformers"):
        keys = theirs.keys() & ours.keys()  # another version may have more settings, with defaults that change nothing
    differing = (key for key in sorted(keys) if theirs.get(key) != ours.get(key))
    return next(((key, theirs.get(key), ours.get(key)) for key in differing), None)


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flatten_config(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _significant_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    significant = {
        key: value
        for key, value in config.items()
        if key not in _INCIDENTAL and not key.startswith("_attn_implementation")
    }
    return flatten_config(
        {key: _significant_settings(value) if isinstance(value, dict) else value for key, value in significant.items()}
    )

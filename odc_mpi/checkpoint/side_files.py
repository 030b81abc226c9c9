"""Files that accompany the weights of an exported model: tokenizer, chat template, and generation_config.json.

The special tokens in the configuration determine where transformers, vLLM and llama.cpp stop generating. Therefore,
they must be those of the tokenizer and the chat template, not the defaults of a configuration class.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from odc_mpi.checkpoint.manifest import MANIFEST, read_manifest
from odc_mpi.data.encoding.encode import end_of_turn_token
from odc_mpi.data.tokenizer import MODEL_CONFIG, load_files, tokenizer_files
from odc_mpi.errors import UserError
from odc_mpi.files import read_settings
from odc_mpi.hub import cached_model_path

GENERATION_CONFIG = "generation_config.json"
#: Settings that are not exported: with them, `generate` fails, returns several sequences, or cannot stream.
_NOT_EXPORTED = {
    *("num_return_sequences", "return_dict_in_generate", "stop_strings", "token_healing", "use_mtp", "is_assistant"),
    *("num_beams", "num_beam_groups", "diversity_penalty", "constraints", "force_words_ids", "early_stopping"),
    *("penalty_alpha", "dola_layers", "cache_implementation", "cache_config", "compile_config"),
}
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


class SideFiles:
    """Tokenizer files and special tokens for a model that is exported from a run with the configuration `config`.

    `base` is the current location of the base model, by default `model.path`. The attribute `tokenizer` maps the names
    of tokenizer files to their contents. These are the base model's files if its tokenizer has a chat template, even if
    the run used a different template; otherwise, they are the run's files.
    """

    def __init__(self, config: Mapping[str, Any], base: Path | None) -> None:
        path = base or config["model"]["path"]
        self._base = Path(cached_model_path(str(path))) if path else None
        trained_with = read_tokenizer_files(config, base)
        of_base = _tokenizer_files(self._base) if self._base else {}
        loaded = _load(trained_with)
        base_tokenizer = loaded if of_base == trained_with else _load(of_base)
        has_template = base_tokenizer is not None and base_tokenizer.chat_template
        files = of_base if has_template else trained_with
        self.tokenizer = {name: content for name, content in files.items() if name != MODEL_CONFIG}
        # The exported tokenizer comes first.
        candidates = [base_tokenizer, loaded] if has_template else [loaded]
        self._tokenizers = [each for each in candidates if each is not None]

    def model_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return `config`, the content of config.json, with the tokenizer's special tokens if they can be loaded."""
        return {**config, **self._special_tokens(config, config)}

    def generation_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of generation_config.json: the base model's, if there is one, with updated special tokens.

        `config` is the content of config.json. Raises `UserError` if the base model's file cannot be read.
        """
        content = read_settings(self._base / GENERATION_CONFIG) if self._base else {}
        defaults = {key: config[key] for key in _SPECIAL if config.get(key) is not None} | content
        special = self._special_tokens(defaults, config)
        settings = {**defaults, **special}.items()
        return {key: value for key, value in settings if value is not None and key not in _NOT_EXPORTED}

    def _special_tokens(self, defaults: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the IDs of special tokens, keyed by setting, or {} if no tokenizer can be loaded.

        `eos_token_id` contains the tokens that end a sequence or a turn, and those of the base model (`defaults`). The
        other IDs are those of the tokenizer or else of the base model, as in the Trainer of transformers.
        """
        if not self._tokenizers:
            return {}
        size = config.get("vocab_size") or float("inf")  # torch refuses a pad token beyond the embedding
        base_ids = dict(defaults) if self._base else {}
        ends = [end for each in self._tokenizers for end in (each.eos_token_id, end_of_turn_token(each))]
        base_ends = base_ids.get("eos_token_id")
        ends += base_ends if isinstance(base_ends, list) else [base_ends]
        eos = [token for token in dict.fromkeys(ends) if token is not None and token < size]
        tokens: dict[str, Any] = {"eos_token_id": eos if len(eos) > 1 else next(iter(eos), None)}
        for key in ("bos_token_id", "pad_token_id"):
            token = getattr(self._tokenizers[0], key)
            tokens[key] = base_ids.get(key) if token is None or token >= size else token
        return tokens


def read_tokenizer_files(config: Mapping[str, Any], base: Path | None) -> dict[str, bytes]:
    """Read the tokenizer files of a run with the configuration `config`, and return their contents, keyed by file name.

    The files come from the first of these locations that has tokenizer files: `data.path`, a setting named `tokenizer`
    in any section, and the model's directory (`base`, by default `model.path`). The result is empty if none has any.
    """
    tokenizers = [section["tokenizer"] for section in config.values() if "tokenizer" in section]
    candidates = [config["data"]["path"], *tokenizers, base or config["model"]["path"]]
    return next((files for candidate in candidates if candidate and (files := _tokenizer_files(Path(candidate)))), {})


def _tokenizer_files(path: Path) -> dict[str, bytes]:
    path = Path(cached_model_path(str(path)))
    if (path / MANIFEST).is_file():  # the run began with this checkpoint
        return read_tokenizer_files(read_manifest(path).metadata["config"], None)
    return tokenizer_files(path)


def end_tokens(tokenizer: Any, base: Path | None) -> list[int]:
    """Return the tokens at which `generate` of transformers stops: the tokenizer's, and those of the base model.

    These are in generation_config.json, or else in config.json. If `base` is a checkpoint, they are those of its base.
    """
    base = base and Path(cached_model_path(str(base)))
    while base and (base / MANIFEST).is_file():
        path = read_manifest(base).metadata["config"]["model"]["path"]
        base = Path(cached_model_path(path)) if path else None
    names = (GENERATION_CONFIG, MODEL_CONFIG) if base else ()
    found = (read_settings(Path(base or "", name)).get("eos_token_id") for name in names)
    eos = next((each for each in found if each is not None), None)
    ends = [tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])]
    return [token for token in dict.fromkeys(ends) if isinstance(token, int)]


def _load(files: Mapping[str, bytes]) -> Any | None:
    """Load a tokenizer from its files. Return None if there are no files, or if transformers cannot load them."""
    try:
        return load_files(files) if files else None
    except UserError:
        return None

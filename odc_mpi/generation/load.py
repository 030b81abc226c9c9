"""What generates: a run, a checkpoint or a directory on disk, its tokenizer, and the tokens that end a text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from odc_mpi.checkpoint.commands import open_newest
from odc_mpi.checkpoint.export import read_tokenizer_files
from odc_mpi.checkpoint.manifest import steps_in
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.data.tokenizer import load_files, load_tokenizer, tokenizer_files
from odc_mpi.errors import UserError
from odc_mpi.models.build import MetaModel, is_model_directory
from odc_mpi.models.load import load_checkpoint, load_model
from odc_mpi.models.peft_directory import base_model_path, is_peft_directory, stored_dtype


@dataclass
class GenerationModel:
    """A model that can be sharded, and what belongs to it.

    Attributes:
        name: Of the checkpoint or directory.
        built: The model, on the meta device.
        tokenizer: A fast tokenizer of transformers.
        stop: Tokens that end any completion.
        dtype: To compute in; None: the types of the module's parameters.
    """

    name: str
    meta_model: MetaModel
    tokenizer: Any
    stop: tuple[int, ...]
    dtype: torch.dtype | None


def load_generation_model(
    path: Path,
    step: str | None,
    tokenizer: Path | None,
    rank: int,
    size: int,
    attn_implementation: str | None = None,
    base: Path | None = None,
) -> GenerationModel:
    """Open what SOURCE names.

    Args:
        path: A Hugging Face model directory; one of adapters, as peft writes it; a checkpoint; or a run, of which the
            newest checkpoint counts.
        step: Of a run: the number of a step, or best, the checkpoint of the lowest evaluation loss; None: the newest.
        tokenizer: A tokenizer's directory, or a data set with one; None: the model's own.
        rank: This rank.
        size: Number of ranks.
        attn_implementation: "sdpa" or "eager"; None: that of the run, else sdpa.
        base: Hugging Face directory of the base of adapters; None: where it was when they were saved.

    Raises:
        UserError: There is no model, no such checkpoint or no tokenizer, or one is damaged.
    """
    if is_peft_directory(path) or is_model_directory(path):
        if step is not None:
            raise UserError(f"--step goes with a run, got {path}, a Hugging Face directory: leave it out")
        meta_model = load_model(path, rank, size, attn_implementation, base)
        return _load_directory(path, meta_model, tokenizer, base)
    checkpoint = _open_checkpoint(path, step)
    meta_model = load_checkpoint(checkpoint, rank, size, attn_implementation, base)
    config = checkpoint.manifest.metadata["config"]
    loaded_tokenizer = load_tokenizer(tokenizer) if tokenizer else _load_run_tokenizer(checkpoint, config, base)
    if base is None and config["model"]["path"]:
        base = Path(config["model"]["path"])
    return GenerationModel(
        f"{checkpoint.directory}", meta_model, loaded_tokenizer, _stop_tokens(loaded_tokenizer, base), None
    )


def _load_directory(path: Path, meta_model: MetaModel, tokenizer: Path | None, base: Path | None) -> GenerationModel:
    if not is_peft_directory(path):
        loaded_tokenizer = load_tokenizer(tokenizer or path)
        return GenerationModel(
            str(path), meta_model, loaded_tokenizer, _stop_tokens(loaded_tokenizer, path), stored_dtype(path)
        )
    # Adapters alone may have been saved without a tokenizer.
    base = base_model_path(path, base)
    loaded_tokenizer = load_tokenizer(tokenizer or (path if tokenizer_files(path) else base))
    return GenerationModel(str(path), meta_model, loaded_tokenizer, _stop_tokens(loaded_tokenizer, base), None)


def _open_checkpoint(path: Path, step: str | None) -> Checkpoint:
    try:
        found = open_newest(path)
    except UserError as error:
        if not path.exists() or not any(steps_in(place) for place in (path / "checkpoints", path, path.parent)):
            raise UserError(
                "expected SOURCE to be a run directory with checkpoints, a checkpoint, or a directory with config.json "
                f"or adapter_config.json, got {path}" + ("" if path.exists() else ", which does not exist")
            ) from error
        raise
    if step is None:
        return found
    with found:
        if step == "best":
            best = found.manifest.metadata.get("best")
            if not best:
                raise UserError(
                    f"--step best: {path} has evaluated no checkpoint: leave --step out, or train with data.eval_path"
                )
            step = str(best["step"])
        if not (step.isascii() and step.isdecimal()):
            raise UserError(f"--step: expected a number or best, got {step!r}")
        steps = steps_in(found.directory.parent)
    if int(step) not in steps:
        raise UserError(f"--step: expected one of {', '.join(map(str, steps))}, got {step}")
    return Checkpoint(steps[int(step)])


def _load_run_tokenizer(checkpoint: Checkpoint, config: Mapping[str, Any], base: Path | None) -> Any:
    files = read_tokenizer_files(config, base)
    if not files:
        raise UserError(
            f"{checkpoint.directory} was trained on {config['data']['path']}, where no tokenizer is found any more: "
            "name one with --tokenizer"
        )
    return load_files(files, Path(config["data"]["path"]))


def _stop_tokens(tokenizer: Any, directory: Path | None) -> tuple[int, ...]:
    """Return the tokenizer's end-of-sequence token, and those of a directory's generation_config.json."""
    found = [tokenizer.eos_token_id]
    path = directory / "generation_config.json" if directory else None
    if path and path.is_file():
        try:
            eos_tokens = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{path}: expected the JSON of a generation configuration, got {error}") from error
        found += eos_tokens if isinstance(eos_tokens, list) else [eos_tokens]
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int)))

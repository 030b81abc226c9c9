"""Loading of a model for generation, with its tokenizer and stop tokens, from a run, a checkpoint or a directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odc_mpi.checkpoint.manifest import steps_in
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.side_files import end_tokens
from odc_mpi.data.tokenizer import load_files, load_tokenizer, tokenizer_files
from odc_mpi.errors import UserError
from odc_mpi.generation.generate import SamplingParams
from odc_mpi.models.adapters.read import base_model_path, is_peft_directory, stored_dtype
from odc_mpi.models.build import MetaModel, is_model_directory
from odc_mpi.models.heads import REWARD, prediction_task
from odc_mpi.models.load import find_checkpoint, load_checkpoint, load_model, load_run_tokenizer


@dataclass(frozen=True)
class GenerateArguments:
    """Options of `odc-mpi generate` and `odc-mpi chat`.

    `source` is a Hugging Face directory, peft directory, checkpoint or run. `step` selects a checkpoint of a run: a
    number, "best" for the lowest evaluation loss, or None for the newest. `tokenizer` is a directory or data set
    with a tokenizer, by default the model's. `odc-mpi generate` requires one of `prompt`, `prompts` and `chat`;
    `odc-mpi chat` uses none. If `out` is None, completions are printed. A rank decodes up to `batch_size` prompts
    at a time. See also `read_examples`, `load_model` and `shard_model`.
    """

    source: Path
    step: str | None
    tokenizer: Path | None
    sampling: SamplingParams
    device: str
    prompt: str | None = None
    prompts: Path | None = None
    chat: list[str] | None = None
    out: Path | None = None
    attn_implementation: str | None = None
    base: Path | None = None
    batch_size: int = 32


@dataclass
class GenerationModel:
    """Model on the meta device, with its tokenizer and the stop tokens that apply to all prompts.

    `name` is the path of the checkpoint or model directory.
    """

    name: str
    meta_model: MetaModel
    tokenizer: Any
    stop: tuple[int, ...]


def load_generation_model(arguments: GenerateArguments, rank: int, size: int) -> GenerationModel:
    """Load the model `arguments.source` and its tokenizer. For `rank` and `size`, see `load_model`.

    Dtypes are those of `load_model`, except that a full model in a Hugging Face directory keeps its `stored_dtype`.
    Raises `UserError` if the model, checkpoint or tokenizer is missing or damaged, or if the model is a reward model.
    """
    path, step, base = arguments.source, arguments.step, arguments.base
    attn_implementation, tokenizer = arguments.attn_implementation, arguments.tokenizer
    if is_peft_directory(path) or is_model_directory(path):
        if step is not None:
            raise UserError(f"--step requires a run, got {path}, a Hugging Face directory: omit --step")
        name = str(path)
        meta_model = load_model(path, rank, size, attn_implementation, base)
        if is_peft_directory(path):
            base = base_model_path(path, base)
        else:
            base, dtype = path, stored_dtype(path)
            for parameter in meta_model.module.parameters():
                parameter.data = parameter.data.to(dtype)
        # Adapters may have been saved without a tokenizer.
        own_files = {} if tokenizer else tokenizer_files(path, base)
        loaded_tokenizer = load_files(own_files, path) if own_files else load_tokenizer(tokenizer or base)
    else:
        checkpoint = _open_checkpoint(path, step)
        name = str(checkpoint.directory)
        meta_model = load_checkpoint(checkpoint, rank, size, attn_implementation, base)
        config = checkpoint.manifest.metadata["config"]
        recorded = checkpoint.manifest.metadata.get("base", {}).get("path") or config["model"]["path"]
        base = base or (Path(recorded) if recorded else None)
        loaded_tokenizer = load_tokenizer(tokenizer) if tokenizer else load_run_tokenizer(checkpoint, base)
    if prediction_task(type(meta_model.module).__name__) is REWARD:
        raise UserError(f"expected a language model, got {name}, a reward model, which generates no text")
    stop = tuple(end_tokens(loaded_tokenizer, base))
    return GenerationModel(name, meta_model, loaded_tokenizer, stop)


def _open_checkpoint(path: Path, step: str | None) -> Checkpoint:
    newest = find_checkpoint(path)
    if newest is None:
        raise UserError(
            "expected SOURCE to be a run directory with checkpoints, a checkpoint, or a directory with config.json or "
            f"adapter_config.json, got {path}" + ("" if path.exists() else ", which does not exist")
        )
    if step is None:
        return newest
    with newest:
        if step == "best":
            best = newest.manifest.metadata.get("best")
            if not best:
                raise UserError(
                    f"--step best: no checkpoint of {path} was evaluated: omit --step, or train with data.eval_path"
                )
            step = str(best["step"])
        if not (step.isascii() and step.isdecimal()):
            raise UserError(f"--step: expected a number or best, got {step!r}")
        steps = steps_in(newest.directory.parent)
    if int(step) not in steps:
        raise UserError(f"--step: expected one of {', '.join(map(str, steps))}, got {step}")
    return Checkpoint(steps[int(step)])

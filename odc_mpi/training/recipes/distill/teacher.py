"""Checks that a teacher can score the tokens of the model that learns from it."""

from pathlib import Path

from odc_mpi.data.dataset.format import vocabulary_digest
from odc_mpi.errors import UserError
from odc_mpi.models.build import MetaModel
from odc_mpi.training.inputs import Inputs, find_tokenizer
from odc_mpi.training.settings import Config

_REMEDY = "set rl.teacher_path to a model of the same family"


def check_teacher(config: Config, teacher: MetaModel, inputs: Inputs) -> None:
    """Raise `UserError` unless the teacher has the vocabulary and positions of the model, and is not quantized."""
    path = config.rl.teacher_path
    assert path is not None, "required by the recipe"
    if teacher.adapter or teacher.quantization:
        raise UserError(
            f"rl.teacher_path: expected a full model, got {path} with adapters or quantized weights: export it with "
            "odc-mpi export --merge"
        )
    if teacher.vocab_size != inputs.model.vocab_size:
        raise UserError(
            f"rl.teacher_path: expected {inputs.model.vocab_size} tokens, as many as the model has, got {path} with "
            f"{teacher.vocab_size}: {_REMEDY}"
        )
    tokenizer = find_tokenizer(Path(path), "rl.teacher_path")
    if tokenizer is not None and vocabulary_digest(tokenizer.get_vocab()) != inputs.dataset.vocabulary:
        raise UserError(
            f"rl.teacher_path: expected the tokenizer of the prompts, got another vocabulary in {path}: {_REMEDY}"
        )
    positions = getattr(teacher.module.config, "max_position_embeddings", None)
    longest = max(int(data.lengths.max()) for data in inputs.datasets.values()) + config.rl.max_completion_length
    if positions is not None and longest > positions:
        raise UserError(
            f"rl.teacher_path: expected a model for prompts and completions of {longest} tokens, got {path} for "
            f"{positions}: lower rl.max_completion_length, or remove the longest prompts"
        )

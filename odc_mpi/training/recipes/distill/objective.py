"""The loss of on-policy distillation (arXiv 2306.13649, with reverse KL divergence; see also arXiv 2402.03300).

The advantage of a token is its log-probability under the teacher minus that under the model. The expectation of the
gradient over the tokens that the model may generate is that of the KL divergence of the model from the teacher at this
position. The value of the loss is its estimate from the generated tokens. The teacher is another model, which is frozen
and has the vocabulary of the model that learns from it.
"""

from pathlib import Path

import torch

from odc_mpi.data.dataset.format import vocabulary_digest
from odc_mpi.data.groups import GroupMicrobatch
from odc_mpi.errors import UserError
from odc_mpi.models.build import MetaModel
from odc_mpi.models.load import load_model
from odc_mpi.training.context import RunContext
from odc_mpi.training.inputs import Inputs, find_tokenizer
from odc_mpi.training.recipes.rollouts.objective import RolloutObjective
from odc_mpi.training.reference_policy import ReferenceFn, frozen_policy
from odc_mpi.training.settings import Config


class DistillObjective(RolloutObjective):
    """Loss of distillation, where the other policy is the teacher."""

    def advantages(
        self, microbatch: GroupMicrobatch, logps: torch.Tensor, other: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the tokens' log-probabilities under the teacher minus those under the model, and the opposite."""
        assert other is not None, "there is always a teacher"
        advantages = other - logps.detach()
        return advantages, -advantages


def build_teacher(config: Config, rank: int = 0, size: int = 1) -> MetaModel:
    """Build the model in `rl.teacher_path` on the meta device. If it has adapters, each rank verifies a share."""
    assert config.rl.teacher_path is not None, "required by the recipe"
    return load_model(Path(config.rl.teacher_path), rank, size, config.model.attn_implementation)


def teacher_policy(context: RunContext) -> ReferenceFn:
    """Shard the teacher beside the model. Return a one-sided function that computes log-probabilities. Collective."""
    config, world = context.config, context.world
    teacher = world.run_on_all(lambda: build_teacher(config, world.rank, world.size))
    world.run_on_all(lambda: _check(config, teacher, context.inputs))
    return frozen_policy(context, teacher)


def _check(config: Config, teacher: MetaModel, inputs: Inputs) -> None:
    """Raise `UserError` unless the teacher has the vocabulary of the model, and positions for all completions."""
    path, model = config.rl.teacher_path, inputs.model
    assert path is not None, "required by the recipe"
    tokenizer = find_tokenizer(Path(path), "rl.teacher_path")
    positions = getattr(teacher.module.config, "max_position_embeddings", None)
    longest = max(int(data.lengths.max()) for data in inputs.datasets.values()) + config.rl.max_completion_length
    problem = ""
    if teacher.vocab_size != model.vocab_size:
        problem = f"{model.vocab_size} tokens, as many as the model has, got {teacher.vocab_size}"
    elif tokenizer is not None and vocabulary_digest(tokenizer.get_vocab()) != inputs.dataset.vocabulary:
        problem = "the tokenizer of the prompts, got another vocabulary"
    elif positions is not None and longest > positions:
        problem = f"positions for prompts and completions of {longest} tokens, got {positions}"
    if problem:
        raise UserError(f"rl.teacher_path: {path}: expected {problem}: set it to another model of the same family")

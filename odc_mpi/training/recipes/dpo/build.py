"""Building the parts of a DPO run."""

import hashlib
import json
from pathlib import Path

import torch

from odc_mpi.checkpoint.state import TrainingState
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.models.configuration import full_configuration, significant_settings
from odc_mpi.models.token_logps import TokenLogps
from odc_mpi.observe.callback import Callback
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.context import RunContext
from odc_mpi.training.evaluation import ForwardPass, held_out_pass
from odc_mpi.training.preferences.answer_logps import AnswerLogps
from odc_mpi.training.preferences.pairs import PairEvaluator, PairObjective
from odc_mpi.training.recipes.dpo.reference import NeededPairs, ReferenceLogps
from odc_mpi.training.recipes.dpo.scorer import PreferenceScorer
from odc_mpi.training.recipes.recipe import Parts
from odc_mpi.training.rundir.checkpointing import state_digest


def build_dpo(context: RunContext, model: ShardedModel, optimizer: torch.optim.Optimizer) -> Parts:
    """Build the objective of a DPO run, and the callbacks for the reference model and the evaluation. Collective.

    The model is set to evaluation mode so that dropout does not affect log-probabilities. Reference log-probabilities
    are also read from the run directory of the resume point.
    """
    config, world, inputs, resume_point = context.config, context.world, context.inputs, context.resume_point
    state = TrainingState(model, optimizer, world.rank)
    assert isinstance(inputs.dataset, Dataset)
    model.eval()
    answer_logps = AnswerLogps(TokenLogps(model.module), inputs.model.packing.packs)

    configuration = significant_settings(full_configuration(model.module))
    settings = json.dumps([configuration, inputs.model.adapter, config.model.param_dtype], sort_keys=True)

    def model_digest() -> str:  # without `inputs`, whose files are closed before the training
        return hashlib.sha256(f"{state_digest(world, state)}{settings}".encode()).hexdigest()

    loader, held_out = inputs.sequence_loader, held_out_pass(context, model)
    training = ForwardPass(context, model, inputs.dataset)
    passes: list[tuple[ForwardPass, NeededPairs]] = [
        (training, lambda completed_steps: loader.upcoming_indices(config.run.steps - completed_steps))
    ]
    if held_out:
        passes.append((held_out, lambda _: held_out.eval_indices))
    directories = [Path(config.run.dir)]
    if resume_point:
        directories.append(resume_point.checkpoint.directory.parent.parent)
    reference = ReferenceLogps(world, answer_logps, passes, directories, model_digest, context.check_stop)
    scorers = [PreferenceScorer(answer_logps, config.dpo, values) for values in reference.values]
    callbacks: list[Callback] = [reference]
    if held_out:
        callbacks.append(PairEvaluator(config.run, model, held_out, scorers[1]))
    return Parts(PairObjective(scorers[0]), callbacks)

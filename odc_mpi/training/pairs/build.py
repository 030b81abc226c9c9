"""Functions that build the objective and the evaluation for a run on pairs of answers."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.models.configuration import full_configuration, significant_settings
from odc_mpi.observe.callback import Callback
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.evaluation import ForwardPass, PairEvaluator, held_out_pass
from odc_mpi.training.inputs import Inputs
from odc_mpi.training.objectives.dpo import AnswerLogps, PreferenceScorer
from odc_mpi.training.objectives.pairs import PairObjective, RewardScorer
from odc_mpi.training.pairs.reference import NeededPairs, ReferenceLogps
from odc_mpi.training.rundir.resume import ResumePoint
from odc_mpi.training.settings import Config


def build_dpo(
    config: Config,
    world: World,
    model: ShardedModel,
    inputs: Inputs,
    resume_point: ResumePoint | None,
    weights_digest: Callable[[], str],
    check_stop: Callable[[], None],
) -> tuple[PairObjective, list[Callback]]:
    """Build the objective of a DPO run, and the callbacks for the reference model and the evaluation. Collective.

    `weights_digest` returns a digest of the parameters, and `check_stop` raises an error on all ranks if a stop was
    requested. Both are collective. The model is set to evaluation mode so that dropout does not affect
    log-probabilities. Reference log-probabilities are also read from the run directory of `resume_point`.
    """
    assert isinstance(inputs.dataset, Dataset)
    model.eval()
    answer_logps = AnswerLogps(model.module, inputs.model.packing.packs)

    configuration = significant_settings(full_configuration(model.module))
    settings = json.dumps([configuration, inputs.model.adapter, config.model.param_dtype], sort_keys=True)

    def model_digest() -> str:  # without `inputs`, whose files are closed before the training
        return hashlib.sha256(f"{weights_digest()}{settings}".encode()).hexdigest()

    loader, held_out = inputs.sequence_loader, held_out_pass(config, world, model, inputs)
    training = ForwardPass(config, world, model, inputs, inputs.dataset)
    passes: list[tuple[ForwardPass, NeededPairs]] = [
        (training, lambda completed_steps: loader.upcoming_indices(config.run.steps - completed_steps))
    ]
    if held_out:
        passes.append((held_out, lambda _: held_out.eval_indices))
    directories = [Path(config.run.dir)]
    if resume_point:
        directories.append(resume_point.checkpoint.directory.parent.parent)
    reference = ReferenceLogps(world, answer_logps, passes, directories, model_digest, check_stop)
    scorers = [PreferenceScorer(answer_logps, config.dpo, values) for values in reference.values]
    callbacks: list[Callback] = [reference]
    if held_out:
        callbacks.append(PairEvaluator(config.run, model, held_out, scorers[1]))
    return PairObjective(scorers[0]), callbacks


def build_reward(
    config: Config, world: World, model: ShardedModel, inputs: Inputs
) -> tuple[PairObjective, list[Callback]]:
    """Build the objective and, if there is held-out data, the evaluator for training a reward model. Collective."""
    model.eval()  # disables dropout, as in TRL
    scorer = RewardScorer(model.module, inputs.model.packing.packs, config.reward)
    held_out = held_out_pass(config, world, model, inputs)
    return PairObjective(scorer), [PairEvaluator(config.run, model, held_out, scorer)] if held_out else []

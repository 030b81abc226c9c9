"""Function that builds the objective and the evaluation of a DPO run."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.observe.callback import Callback
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.dpo.evaluation import PreferenceEvaluator
from odc_mpi.training.dpo.reference import NeededPairs, ReferenceLogps
from odc_mpi.training.evaluation import ForwardPass
from odc_mpi.training.inputs import Inputs, initial_cost_model
from odc_mpi.training.objectives.dpo import AnswerLogps, DPOObjective
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
) -> tuple[DPOObjective, list[Callback]]:
    """Build the objective and further callbacks of a DPO run. Collective.

    Sets the model to evaluation mode: dropout would change the log-probabilities that are compared. For the last two
    arguments, see `ReferenceLogps`.
    """
    assert isinstance(inputs.dataset, Dataset)
    model.eval()
    packs = inputs.model.packing.packs
    answer_logps = AnswerLogps(model.module, packs)
    cost_model = initial_cost_model(config.data, inputs.model)

    def compute(microbatch: Microbatch) -> torch.Tensor:
        return answer_logps(microbatch).logps

    def forward_pass(dataset: Dataset) -> ForwardPass:
        return ForwardPass(config, world, model, dataset, cost_model, packs)

    def needed_for_training(completed_steps: int) -> npt.NDArray[np.int64]:
        return loader.upcoming_indices(config.run.steps - completed_steps)

    loader, held_out = inputs.sequence_loader, inputs.evaluation
    passes: list[tuple[ForwardPass, NeededPairs]] = [(forward_pass(inputs.dataset), needed_for_training)]
    if isinstance(held_out, Dataset):
        indices = np.arange(min(config.data.eval_sequences or len(held_out), len(held_out)))
        passes.append((forward_pass(held_out), lambda completed_steps: indices))
    directories = [Path(config.run.dir)]
    if resume_point:
        directories.append(resume_point.checkpoint.directory.parent.parent)
    reference = ReferenceLogps(world, compute, passes, directories, weights_digest, check_stop)
    callbacks: list[Callback] = [
        PreferenceEvaluator(config.run, model, evaluation, indices, answer_logps, config.dpo, reference)
        for evaluation, _ in passes[1:]
    ]
    return DPOObjective(answer_logps, config.dpo, reference), callbacks

"""Function that builds the objective of a run of a reward model, and the evaluation on held-out pairs."""

from odc_mpi.observe.callback import Callback
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.evaluation import PairEvaluator, held_out_pass
from odc_mpi.training.inputs import Inputs
from odc_mpi.training.objectives.reward import AnswerRewards, RewardObjective, RewardScorer
from odc_mpi.training.settings import Config


class RewardModelEvaluator(PairEvaluator, accuracy="eval_accuracy"):
    """Computes the loss, rewards and accuracy of held-out pairs."""


def build_reward(
    config: Config, world: World, model: ShardedModel, inputs: Inputs
) -> tuple[RewardObjective, list[Callback]]:
    """Build the objective and the evaluator of a run of a reward model. Collective.

    Sets the model to evaluation mode, so that there is no dropout, as in TRL.
    """
    model.eval()
    scorer = RewardScorer(AnswerRewards(model.module, inputs.model.packing.packs), config.reward)
    held_out = held_out_pass(config, world, model, inputs)
    return RewardObjective(scorer), [RewardModelEvaluator(config.run, model, *each, scorer) for each in held_out]

"""Function that builds the objective of a run of a reward model, and the evaluation on held-out pairs."""

from statistics import fmean
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from odc_mpi.data.microbatch import Microbatch
from odc_mpi.observe.callback import Callback
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.evaluation import ForwardPass, PairEvaluator, held_out_pass
from odc_mpi.training.inputs import Inputs
from odc_mpi.training.objectives.reward import (
    STATISTICS,
    AnswerRewards,
    RewardObjective,
    reward_loss,
    reward_statistics,
)
from odc_mpi.training.reward.settings import RewardConfig
from odc_mpi.training.settings import Config, RunConfig


class RewardModelEvaluator(PairEvaluator, accuracy="eval_accuracy"):
    """Computes the loss, rewards and accuracy of held-out pairs."""

    reductions: ClassVar = dict.fromkeys(("loss", *STATISTICS), fmean) | {"min_reward": min, "max_reward": max}

    def __init__(
        self,
        run: RunConfig,
        model: ShardedModel,
        forward_pass: ForwardPass,
        indices: npt.NDArray[np.int64],
        answer_rewards: AnswerRewards,
        reward: RewardConfig,
    ) -> None:
        super().__init__(run, model, forward_pass, indices)
        self._answer_rewards, self._reward = answer_rewards, reward

    def score(self, microbatch: Microbatch) -> torch.Tensor:
        """Return the loss, the statistics, and the lower and the higher reward of each pair."""
        rewards = self._answer_rewards(microbatch)
        loss = reward_loss(self._reward, rewards)[:, None]
        return torch.cat([loss, reward_statistics(rewards), rewards.sort(1).values], 1)


def build_reward(
    config: Config, world: World, model: ShardedModel, inputs: Inputs
) -> tuple[RewardObjective, list[Callback]]:
    """Build the objective and the evaluator of a run of a reward model. Collective.

    Sets the model to evaluation mode, so that there is no dropout, as in TRL.
    """
    model.eval()
    answer_rewards = AnswerRewards(model.module, inputs.model.packing.packs)
    callbacks: list[Callback] = [
        RewardModelEvaluator(config.run, model, *each, answer_rewards, config.reward)
        for each in held_out_pass(config, world, model, inputs)
    ]
    return RewardObjective(answer_rewards, config.reward), callbacks

"""Reward models (arXiv 2203.02155), trained to score the chosen answer of a pair higher than the rejected one."""

from typing import cast

import torch
from torch.nn.functional import logsigmoid
from typing_extensions import override

from odc_mpi.data.loader import Minibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.data.pairs.microbatch import PairMicrobatch, as_padded_rows, select_last_tokens
from odc_mpi.models.heads import reward_scores
from odc_mpi.training.objectives.pairs import PairObjective, PairScorer, PairScores
from odc_mpi.training.pairs.settings import RewardConfig

#: Names of the columns of `reward_statistics`, the same as those of the metrics in TRL.
STATISTICS = ("accuracy", "margin", "mean_reward", "min_reward", "max_reward")


class AnswerRewards:
    """Computes the reward of each answer in a pair: the model's score at the answer's last non-padding token.

    Args:
        module: Reward model, or the `module` of a sharded reward model.
        packs: False if each answer must be in a separate row (see `data.pairs.microbatch.as_padded_rows`).
    """

    def __init__(self, module: torch.nn.Module, packs: bool) -> None:
        self._module, self._packs = module, packs
        self._padding: int = module.config.get_text_config().pad_token_id  # type: ignore[operator, union-attr]

    def __call__(self, microbatch: Microbatch) -> torch.Tensor:
        """Return the rewards of the chosen and the rejected answer in each pair, float64 `[pairs, 2]`. One-sided."""
        pairs = select_last_tokens(cast(PairMicrobatch, microbatch), self._padding)
        pairs = pairs if self._packs else as_padded_rows(pairs)
        return reward_scores(self._module, pairs.inputs, pairs.logit_positions).double().reshape(-1, 2)


class RewardScorer(PairScorer):
    """Computes the loss and the statistics of each pair from the rewards of its answers."""

    statistics = STATISTICS

    def __init__(self, answer_rewards: AnswerRewards, reward: RewardConfig) -> None:
        self._answer_rewards, self._reward = answer_rewards, reward

    @override
    def __call__(self, minibatch: Minibatch, microbatch: Microbatch) -> PairScores:
        rewards = self._answer_rewards(microbatch)
        return PairScores(reward_loss(self._reward, rewards), reward_statistics(rewards))


class RewardObjective(PairObjective, margin="margin", accuracy="accuracy"):
    """Mean of `reward_loss` over all pairs in a minibatch."""


def reward_loss(reward: RewardConfig, rewards: torch.Tensor) -> torch.Tensor:
    """Return the loss of each pair, float64 `[pairs]`, given the rewards of both answers, `[pairs, 2]`.

    The loss is -log s(r_chosen - r_rejected), where s is the logistic function, plus `center_rewards_coefficient` times
    the square of the sum of both rewards (arXiv 2312.09244).
    """
    loss = -logsigmoid(rewards[:, 0] - rewards[:, 1])
    return loss + (reward.center_rewards_coefficient or 0.0) * rewards.sum(1) ** 2


def reward_statistics(rewards: torch.Tensor) -> torch.Tensor:
    """Return the accuracy (1 or 0), margin, and mean, minimum and maximum reward of each pair, float64 `[pairs, 5]`."""
    rewards = rewards.detach()
    margins = rewards[:, 0] - rewards[:, 1]
    return torch.stack([(margins > 0).double(), margins, rewards.mean(1), rewards.amin(1), rewards.amax(1)], 1)

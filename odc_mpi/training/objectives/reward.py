"""Reward models (arXiv 2203.02155), trained to score the chosen answer of a pair higher than the rejected one."""

from typing import cast

import torch
from torch.nn.functional import logsigmoid
from typing_extensions import override

from odc_mpi.data.loader import Minibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.data.pairs.microbatch import PairMicrobatch, as_padded_rows, select_last_tokens
from odc_mpi.models.heads import reward_scores
from odc_mpi.training.objectives.pairs import PairScorer, PairScores
from odc_mpi.training.pairs.settings import RewardConfig


class RewardScorer(PairScorer):
    """Computes the rewards of the answers in pairs, and from them the loss and the statistics of each pair.

    The loss is -log s(r_chosen - r_rejected), where s is the logistic function, plus `center_rewards_coefficient` times
    the square of the sum of both rewards (arXiv 2312.09244). The statistics have the names of TRL's metrics. For
    `packs`, see `training.objectives.dpo.AnswerLogps`.
    """

    statistics = ("accuracy", "margin", "mean_reward", "min_reward", "max_reward")
    margin, accuracy = "margin", "accuracy"

    def __init__(self, module: torch.nn.Module, packs: bool, reward: RewardConfig) -> None:
        self._module, self._packs = module, packs
        self._center = reward.center_rewards_coefficient or 0.0
        self._padding: int = module.config.get_text_config().pad_token_id  # type: ignore[operator, union-attr]

    def rewards(self, microbatch: Microbatch) -> torch.Tensor:
        """Return the scores at the last non-padding tokens of both answers, float64 `[pairs, 2]`. One-sided."""
        pairs = select_last_tokens(cast(PairMicrobatch, microbatch), self._padding)
        pairs = pairs if self._packs else as_padded_rows(pairs)
        return reward_scores(self._module, pairs.inputs, pairs.logit_positions).double().reshape(-1, 2)

    @override
    def __call__(self, minibatch: Minibatch, microbatch: Microbatch) -> PairScores:
        rewards = self.rewards(microbatch)
        losses = -logsigmoid(rewards[:, 0] - rewards[:, 1]) + self._center * rewards.sum(1) ** 2
        rewards = rewards.detach()
        margins = rewards[:, 0] - rewards[:, 1]
        statistics = [(margins > 0).double(), margins, rewards.mean(1), rewards.amin(1), rewards.amax(1)]
        return PairScores(losses, torch.stack(statistics, 1))

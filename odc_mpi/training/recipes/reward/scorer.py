"""Loss and statistics of a reward model for pairs of answers."""

from typing import cast

import torch
from torch.nn.functional import logsigmoid
from typing_extensions import override

from odc_mpi.data.groups import GroupMicrobatch, as_padded_rows, select_last_tokens
from odc_mpi.data.loader import PlannedMinibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.models.heads import reward_scores
from odc_mpi.observe.metrics import RESULT, Metric
from odc_mpi.training.preferences.pairs import PairScorer, PairScores
from odc_mpi.training.recipes.reward import RewardConfig


class RewardScorer(PairScorer):
    """Computes the rewards of the answers in pairs and, from the rewards, the loss (arXiv 2203.02155) and statistics.

    The loss is -log s(r_chosen - r_rejected), where s is the logistic function, plus `center_rewards_coefficient` times
    the square of the sum of both rewards (arXiv 2312.09244). The statistics have the same names as TRL's metrics. For
    `packs`, see `training.preferences.answer_logps.AnswerLogps`.
    """

    statistics = ("accuracy", "margin", "mean_reward", "min_reward", "max_reward")
    metrics = (
        Metric("margin", "difference of the scores of both answers", RESULT, form="{:.4f}", column=("margin", 8)),
        Metric("accuracy", "accuracy", RESULT, "", "{:.1%}", ("accuracy", 8), views="watch"),
        Metric("mean_reward", "mean score of an answer", RESULT),
        Metric("min_reward", "lowest score of an answer", RESULT),
        Metric("max_reward", "highest score of an answer", RESULT),
    )

    def __init__(self, module: torch.nn.Module, packs: bool, reward: RewardConfig) -> None:
        self._module, self._packs = module, packs
        self._center = reward.center_rewards_coefficient or 0.0
        self._padding: int = module.config.get_text_config().pad_token_id  # type: ignore[operator, union-attr]

    def rewards(self, microbatch: Microbatch) -> torch.Tensor:
        """Return the scores, float64 `[pairs, 2]`, at the last non-padding token of each answer. One-sided."""
        pairs = select_last_tokens(cast(GroupMicrobatch, microbatch), self._padding)
        pairs = pairs if self._packs else as_padded_rows(pairs)
        return reward_scores(self._module, pairs.inputs, pairs.logit_positions).double().reshape(-1, 2)

    @override
    def __call__(self, minibatch: PlannedMinibatch, microbatch: Microbatch) -> PairScores:
        rewards = self.rewards(microbatch)
        losses = -logsigmoid(rewards[:, 0] - rewards[:, 1]) + self._center * rewards.sum(1) ** 2
        rewards = rewards.detach()
        margins = rewards[:, 0] - rewards[:, 1]
        statistics = [(margins > 0).double(), margins, rewards.mean(1), rewards.amin(1), rewards.amax(1)]
        return PairScores(losses, torch.stack(statistics, 1))

"""Objective that averages a loss over pairs of answers, and the scorer of reward models, which computes such losses.

The scorer of DPO is in `training.objectives.dpo`.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple, cast

import torch
from torch.nn.functional import logsigmoid
from typing_extensions import override

from odc_mpi.data.groups import GroupMicrobatch, as_padded_rows, select_last_tokens
from odc_mpi.data.loader import Minibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.models.heads import reward_scores
from odc_mpi.observe.callback import Step
from odc_mpi.observe.metrics import RESULT, Metric
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.training.loop import Objective
from odc_mpi.training.recipes.reward import RewardConfig

#: Statistics that are reduced to their minimum or maximum over all pairs. Other statistics are averaged.
EXTREMES = {"min_reward": min, "max_reward": max}


class PairScores(NamedTuple):
    """Scores of the pairs in a microbatch.

    Attributes:
        losses: Loss of each pair, float64 `[pairs]`, with gradients.
        statistics: Statistics of each pair, float64 `[pairs, len(PairScorer.statistics)]`, without gradients.
        token_sums: Sums over all loss tokens, float64 `[len(PairScorer.token_sums)]`, or None if the scorer has none.
        router_loss: Auxiliary router loss, or None, as in `TokenScores`.
    """

    losses: torch.Tensor
    statistics: torch.Tensor
    token_sums: torch.Tensor | None = None
    router_loss: torch.Tensor | None = None


class PairScorer(ABC):
    """Base class for callables that compute the losses of pairs under a model.

    `statistics` contains the names of the statistics for each pair, and `token_sums` those of the sums over loss
    tokens. `metrics` declares both.
    """

    statistics: tuple[str, ...]
    metrics: tuple[Metric, ...]
    token_sums: tuple[str, ...] = ()

    @abstractmethod
    def __call__(self, minibatch: Minibatch, microbatch: Microbatch) -> PairScores:
        """Score the pairs in one microbatch of `minibatch`. All tensors are on the model's device. One-sided."""


class RewardScorer(PairScorer):
    """Computes the rewards of the answers in pairs and, from the rewards, the loss (arXiv 2203.02155) and statistics.

    The loss is -log s(r_chosen - r_rejected), where s is the logistic function, plus `center_rewards_coefficient` times
    the square of the sum of both rewards (arXiv 2312.09244). The statistics have the same names as TRL's metrics. For
    `packs`, see `training.objectives.dpo.AnswerLogps`.
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
    def __call__(self, minibatch: Minibatch, microbatch: Microbatch) -> PairScores:
        rewards = self.rewards(microbatch)
        losses = -logsigmoid(rewards[:, 0] - rewards[:, 1]) + self._center * rewards.sum(1) ** 2
        rewards = rewards.detach()
        margins = rewards[:, 0] - rewards[:, 1]
        statistics = [(margins > 0).double(), margins, rewards.mean(1), rewards.amin(1), rewards.amax(1)]
        return PairScores(losses, torch.stack(statistics, 1))


class PairObjective(Objective):
    """Mean of a scorer's losses over all pairs in a minibatch, plus the auxiliary router loss, if any."""

    extremes = EXTREMES

    def __init__(self, scorer: PairScorer) -> None:
        self._scorer = scorer
        self.gathered_names = ("loss", *scorer.token_sums, *scorer.statistics)
        self.metrics = (*self.metrics, *scorer.metrics)

    def loss(self, minibatch: Minibatch, microbatch: Microbatch) -> torch.Tensor:
        """Return a microbatch's contribution to the mean loss of the minibatch. One-sided."""
        scores, num_pairs = self._scorer(minibatch, microbatch), len(minibatch.indices)
        loss = scores.losses.sum() / num_pairs
        if scores.router_loss is not None:
            loss = loss + scores.router_loss * (microbatch.num_tokens / minibatch.num_tokens)
        tensors = {min: torch.amin, max: torch.amax}
        columns = zip(self._scorer.statistics, scores.statistics.unbind(1), strict=True)
        self.statistics = torch.stack(
            [tensors[EXTREMES[name]](x, 0) if name in EXTREMES else x.sum() / num_pairs for name, x in columns]
        )
        if scores.token_sums is not None:
            self.statistics = torch.cat([scores.token_sums / minibatch.num_tokens, self.statistics])
        return loss

    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        """Add metrics for the pairs of all ranks to the step. Their names are those used in TRL."""
        step.metrics |= {**self.reduce(gathered), "num_tokens": step.minibatch.num_tokens}

"""Reward models (arXiv 2203.02155): the score of the chosen answer of a pair exceeds that of the rejected one."""

import math
from typing import ClassVar, cast

import torch
from torch.nn.functional import logsigmoid

from odc_mpi.data.loader import Minibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.data.pairs.microbatch import PairMicrobatch, as_padded_rows, select_last_tokens
from odc_mpi.models.heads.scores import RewardScores
from odc_mpi.observe.callback import MicrobatchResult, Step
from odc_mpi.observe.metrics import ProgressColumn
from odc_mpi.shard import model as sharded
from odc_mpi.training.loop import Objective
from odc_mpi.training.objectives.pairs import PairObjective
from odc_mpi.training.reward.settings import RewardConfig

#: Names of the columns of `reward_statistics`. They are those of the metrics of TRL.
STATISTICS = ("accuracy", "margin", "mean_reward")
_EXTREMES = ("min_reward", "max_reward")


class AnswerRewards:
    """Computes the rewards of the answers of pairs under a model: the scores of their last tokens.

    Args:
        module: Reward model, or the `module` of a sharded one.
        packs: False for models that need a row for each answer; see `data.pairs.microbatch.as_padded_rows`.
    """

    def __init__(self, module: torch.nn.Module, packs: bool) -> None:
        self._scores, self._packs = RewardScores(module), packs
        self._padding: int = module.config.get_text_config().pad_token_id  # type: ignore[operator, union-attr]

    def __call__(self, microbatch: Microbatch) -> torch.Tensor:
        """Return the rewards of the chosen and the rejected answer of each pair, float64 `[pairs, 2]`. One-sided."""
        pairs = select_last_tokens(cast(PairMicrobatch, microbatch), self._padding)
        pairs = pairs if self._packs else as_padded_rows(pairs)
        return self._scores(pairs.inputs, pairs.logit_positions).double().reshape(-1, 2)


class RewardObjective(PairObjective):
    """Mean of `reward_loss` over all pairs of a minibatch."""

    columns: ClassVar = (
        *Objective.columns,
        ProgressColumn("margin", 8, lambda line: f"{line['margin']:.4f}"),
        ProgressColumn("accuracy", 8, lambda line: f"{line['accuracy']:.1%}"),
    )
    summed_names = ("loss", *STATISTICS)
    gathered_names = (*summed_names, *_EXTREMES)

    def __init__(self, answer_rewards: AnswerRewards, reward: RewardConfig) -> None:
        self._answer_rewards, self._reward = answer_rewards, reward

    def on_step_begin(self, step: Step) -> None:
        """Set all sums of the step to 0, and forget its lowest and highest rewards."""
        super().on_step_begin(step)
        self._lowest, self._highest = math.inf, -math.inf

    def loss_and_statistics(self, minibatch: Minibatch, microbatch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the contributions of a microbatch to the mean loss, and to the other means. One-sided."""
        rewards = self._answer_rewards(microbatch)
        self._last_rewards = rewards.detach()
        num_pairs = len(minibatch.indices)
        return reward_loss(self._reward, rewards).sum() / num_pairs, reward_statistics(rewards).sum(0) / num_pairs

    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        """Add the loss and the statistics of a microbatch to those of the step."""
        super().on_microbatch_end(result)
        rewards = self._last_rewards.flatten().tolist()
        self._lowest, self._highest = min(self._lowest, *rewards), max(self._highest, *rewards)

    def local_values(self) -> tuple[float, ...]:
        """Return the sums of this rank's microbatches, and its lowest and highest rewards."""
        return *super().local_values(), self._lowest, self._highest

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Add the metrics of `RewardTrainer` in TRL to those of the step, over the pairs of all ranks."""
        super().on_gathered(step, gathered)
        lowest, highest = (gathered.per_rank(name) for name in _EXTREMES)
        step.metrics |= {"min_reward": float(lowest.min()), "max_reward": float(highest.max())}


def reward_loss(reward: RewardConfig, rewards: torch.Tensor) -> torch.Tensor:
    """Return the loss of each pair, float64 `[pairs]`, given the rewards of both answers, `[pairs, 2]`.

    It is -log s(r_chosen - r_rejected), with the logistic function s. `center_rewards_coefficient` times the square of
    the sum of both rewards is added to it (arXiv 2312.09244).
    """
    loss = -logsigmoid(rewards[:, 0] - rewards[:, 1])
    return loss + (reward.center_rewards_coefficient or 0.0) * rewards.sum(1) ** 2


def reward_statistics(rewards: torch.Tensor) -> torch.Tensor:
    """Return the values in `STATISTICS` for each pair, float64 `[pairs, 3]`, without gradients."""
    rewards = rewards.detach()
    margins = rewards[:, 0] - rewards[:, 1]
    return torch.stack([(margins > 0).double(), margins, rewards.mean(1)], 1)

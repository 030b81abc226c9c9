"""The loss that recipes for completions share: the sum of -advantage * log-probability over the tokens.

The sum of the gradients is divided by a number that is known when all groups are generated (`rl.loss_type`):

    dapo       number of loss tokens                                        arXiv 2503.14476
    grpo       number of completions; the loss of a completion is the mean over its tokens
    dr_grpo    number of completions times rl.max_completion_length         arXiv 2503.20783

On-policy (`rl.max_staleness` 0), the probability ratio is 1; otherwise see `rollouts.weights`.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, cast

import torch

from odc_mpi.data.groups import GroupMicrobatch
from odc_mpi.data.loader import PlannedMinibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.models.token_logps import TokenLogps
from odc_mpi.observe.callback import Step
from odc_mpi.observe.metrics import DETAILS, RESULT, Metric
from odc_mpi.rollout.rewards import EPSILON
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.training.loop import Objective
from odc_mpi.training.recipes.rollouts.metrics import reward_std
from odc_mpi.training.recipes.rollouts.settings import RLConfig
from odc_mpi.training.recipes.rollouts.weights import WeightedLosses, weighted_losses
from odc_mpi.training.reference_policy import ReferenceFn

#: Statistics of importance weights, with `rl.max_staleness`.
_WEIGHT_NAMES = ("ratio_sum", "ratio_min", "ratio_max", "ratios_too_low", "ratios_too_high")


class RolloutObjective(Objective):
    """Loss for minibatches of at most `num_groups` prompt groups, normalized by counts from `RolloutSource`.

    `other` is another policy, such as a reference or a teacher, or None.
    """

    extremes: ClassVar = {"logp_difference_max": max, "ratio_min": min, "ratio_max": max}
    metrics: Sequence[Metric] = (
        Metric("loss", "with GRPO and distillation the objective", DETAILS, "first last", "{:.4f}", ("loss", 8)),
        Metric("kl", "KL divergence from the reference, with `rl.beta` or KTO, or from a teacher", RESULT),
        Metric("sampling/sampling_logp_difference/mean", "difference of log-probabilities in training and sampling"),
        Metric("sampling/sampling_logp_difference/max", "largest difference of log-probabilities"),
        Metric("sampling/importance_sampling_ratio/mean", "mean ratio of probabilities in training and sampling"),
        Metric("sampling/importance_sampling_ratio/min", "smallest ratio of probabilities"),
        Metric("sampling/importance_sampling_ratio/max", "largest ratio of probabilities, before it is bounded"),
        Metric("clip_ratio/low_mean", "share of tokens whose ratio was bounded because it is too low"),
        Metric("clip_ratio/high_mean", "share of tokens whose ratio was bounded because it is too high"),
        Metric("clip_ratio/region_mean", "share of tokens whose ratio was bounded"),
    )

    def __init__(
        self, module: torch.nn.Module, rl: RLConfig, num_groups: int, other: ReferenceFn | None = None
    ) -> None:
        self._token_logps = TokenLogps(module)
        self._rl, self._other, self._num_groups = rl, other, num_groups
        names = (_WEIGHT_NAMES if rl.max_staleness else ()) + (() if other is None else ("rollout_kl",))
        self.gathered_names = ("rollout_loss", "logp_difference", "logp_difference_max", *names)
        max_completions = num_groups * rl.num_generations
        self.loss_normalizer = loss_normalizer(
            rl, num_tokens=max_completions * rl.max_completion_length, num_completions=max_completions
        )

    @abstractmethod
    def advantages(
        self, microbatch: GroupMicrobatch, logps: torch.Tensor, other: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the advantage of each token, and an estimate of the KL divergence from the other policy, if any.

        `logps` are the log-probabilities of the tokens under the policy, with gradients. `other` are those under the
        other policy, without gradients, or None if there is no other policy. All tensors are float `[K]`.
        """

    def loss(self, minibatch: PlannedMinibatch, microbatch: Microbatch) -> torch.Tensor:
        """Return the loss of a microbatch, summed over its tokens and not yet normalized. One-sided."""
        microbatch = cast(GroupMicrobatch, microbatch)
        arguments = microbatch.inputs, microbatch.logit_positions, microbatch.targets, self._rl.temperature
        logps = self._token_logps(*arguments).logps
        sampling_logps, answers = microbatch.columns["logps"], microbatch.answers
        num_answers = len(microbatch.columns["advantage"])
        differences = (logps.detach() - sampling_logps).abs()
        statistics = [differences.sum(), differences.max()]
        other = None if self._other is None else self._other(*arguments).logps
        advantages, kl = self.advantages(microbatch, logps, other)
        if self._rl.max_staleness:
            weighted = weighted_losses(self._rl, logps, sampling_logps, advantages, answers, num_answers)
            per_token = weighted.losses
            statistics += _weight_statistics(weighted)
        else:
            # The log-probabilities from sampling are those of the same policy.
            per_token = -torch.exp(logps - logps.detach()) * advantages
        if kl is not None:
            statistics.append(kl.detach().sum())
            per_token = per_token + self._rl.beta * kl if self._rl.beta else per_token
        if self._rl.loss_type == "grpo":
            ones = torch.ones_like(per_token)  # unlike `bincount`, the sum does not wait for a GPU
            counts = ones.new_zeros(num_answers).index_add(0, answers, ones)
            per_token = per_token / counts[answers]
        self.statistics = torch.stack(statistics)
        return per_token.sum()

    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        """Compute `loss_normalizer` from all ranks' counts, and add the loss and other values to the step's metrics."""
        loss_tokens, completions = gathered.sum("loss_tokens"), gathered.sum("completions")
        self.loss_normalizer = loss_normalizer(self._rl, num_tokens=loss_tokens, num_completions=completions)
        if self._rl.scale_rewards == "batch":
            # The gradient is linear in the advantages, whose divisor is only known now.
            self.loss_normalizer *= (reward_std(gathered, self._num_groups) or 0.0) + EPSILON
        tokens, reduced = max(1.0, gathered.sum("trained_tokens")), self.reduce(gathered)
        step.metrics |= {
            "loss": reduced["rollout_loss"] / self.loss_normalizer,
            "sampling/sampling_logp_difference/mean": reduced["logp_difference"] / tokens,
            "sampling/sampling_logp_difference/max": max(0.0, reduced["logp_difference_max"]),
        }
        if self._other is not None:
            step.metrics["kl"] = reduced["rollout_kl"] / tokens
        if self._rl.max_staleness:
            ratio, smallest, largest, low, high = (reduced[name] for name in _WEIGHT_NAMES)
            step.metrics |= {
                "sampling/importance_sampling_ratio/mean": ratio / tokens,
                "sampling/importance_sampling_ratio/min": smallest if math.isfinite(smallest) else None,
                "sampling/importance_sampling_ratio/max": largest if math.isfinite(largest) else None,
                "clip_ratio/low_mean": low / tokens,
                "clip_ratio/high_mean": high / tokens,
                "clip_ratio/region_mean": (low + high) / tokens,
            }


def _weight_statistics(weighted: WeightedLosses) -> list[torch.Tensor]:
    """Return the statistics `_WEIGHT_NAMES` of a microbatch."""
    ratios = weighted.ratios
    return [ratios.sum(), ratios.min(), ratios.max(), weighted.too_low.sum(), weighted.too_high.sum()]


def loss_normalizer(rl: RLConfig, *, num_tokens: float, num_completions: float) -> float:
    """Return the divisor, at least 1, for a minibatch's loss with `rl.loss_type`. `num_tokens` counts loss tokens."""
    normalizers = {"dapo": num_tokens, "grpo": num_completions, "dr_grpo": num_completions * rl.max_completion_length}
    return max(1.0, float(normalizers[rl.loss_type]))

"""Strictly on-policy GRPO (arXiv 2402.03300): advantages compare the completions of a prompt with each other.

The loss of a token is that of TRL's `GRPOTrainer` with one update per rollout, so the probability ratio is 1 and
clipping has no effect. The gradient is that of -advantage * log-probability, plus beta times the KL divergence from a
reference policy. The sum of the gradients is divided by a number that is known when all groups are generated:

    dapo       number of loss tokens                                        arXiv 2503.14476
    grpo       number of completions; the loss of a completion is the mean over its tokens
    dr_grpo    number of completions times rl.max_completion_length         arXiv 2503.20783

If beta is 0, a group whose rewards are all equal has no gradient. It is not trained on, but counts in the normalizer.
"""

from typing import ClassVar, cast

import torch

from odc_mpi.data.groups import GroupMicrobatch
from odc_mpi.data.loader import PlannedMinibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.models.token_logps import TokenLogps
from odc_mpi.observe.callback import Step
from odc_mpi.observe.metrics import DETAILS, RESULT, Metric
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.training.loop import Objective
from odc_mpi.training.recipes.rollouts.settings import RLConfig
from odc_mpi.training.reference_policy import ReferenceFn


class GRPOObjective(Objective):
    """GRPO loss for minibatches of at most `num_groups` prompt groups, normalized by counts from `RolloutSource`."""

    extremes: ClassVar = {"logp_difference_max": max}
    metrics = (
        Metric("loss", "with GRPO the objective", DETAILS, "first last", "{:.4f}", ("loss", 8)),
        Metric("kl", "KL divergence from the reference, with `rl.beta` or KTO", RESULT),
        Metric("sampling/sampling_logp_difference/mean", "difference of log-probabilities in training and sampling"),
        Metric("sampling/sampling_logp_difference/max", "largest difference of log-probabilities"),
    )

    def __init__(
        self, module: torch.nn.Module, rl: RLConfig, num_groups: int, reference: ReferenceFn | None = None
    ) -> None:
        self._token_logps = TokenLogps(module)
        self._rl, self._reference = rl, reference
        kl = () if reference is None else ("grpo_kl",)
        self.gathered_names = ("grpo_loss", "logp_difference", "logp_difference_max", *kl)
        max_completions = num_groups * rl.num_generations
        self.loss_normalizer = loss_normalizer(
            rl, num_tokens=max_completions * rl.max_completion_length, num_completions=max_completions
        )

    def loss(self, minibatch: PlannedMinibatch, microbatch: Microbatch) -> torch.Tensor:
        """Return the loss of a microbatch, summed over its tokens and not yet normalized. One-sided."""
        microbatch = cast(GroupMicrobatch, microbatch)
        arguments = microbatch.inputs, microbatch.logit_positions, microbatch.targets, self._rl.temperature
        logps = self._token_logps(*arguments).logps
        # The log-probabilities from sampling are those of the same policy.
        differences = (logps.detach() - microbatch.columns["logps"]).abs()
        statistics = [differences.sum(), differences.max()]
        answers, advantages = microbatch.answers, microbatch.columns["advantage"].float()
        per_token = -torch.exp(logps - logps.detach()) * advantages[answers]
        if self._reference is not None:
            kl = kl_k3(logps, self._reference(*arguments).logps)
            statistics.append(kl.detach().sum())
            per_token = per_token + self._rl.beta * kl
        if self._rl.loss_type == "grpo":
            ones = torch.ones_like(per_token)  # unlike `bincount`, the sum does not wait for a GPU
            counts = torch.zeros_like(advantages).index_add(0, answers, ones)
            per_token = per_token / counts[answers]
        self.statistics = torch.stack(statistics)
        return per_token.sum()

    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        """Compute `loss_normalizer` from all ranks' counts, and add the loss and other values to the step's metrics."""
        loss_tokens, completions = gathered.sum("loss_tokens"), gathered.sum("completions")
        self.loss_normalizer = loss_normalizer(self._rl, num_tokens=loss_tokens, num_completions=completions)
        tokens = max(1.0, gathered.sum("trained_tokens"))
        loss, difference, largest_difference, *kl = self.reduce(gathered).values()
        step.metrics |= {
            "loss": loss / self.loss_normalizer,
            "sampling/sampling_logp_difference/mean": difference / tokens,
            "sampling/sampling_logp_difference/max": max(0.0, largest_difference),
        }
        if kl:
            step.metrics["kl"] = kl[0] / tokens


def kl_k3(logps: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the k3 estimate (http://joschu.net/blog/kl-approx.html), `[K]`, of the KL divergence from `reference`."""
    difference = reference - logps
    return torch.expm1(difference) - difference  # exp(x) - 1 - x would be noise if the policies are similar


def loss_normalizer(rl: RLConfig, *, num_tokens: float, num_completions: float) -> float:
    """Return the divisor, at least 1, for a minibatch's loss with `rl.loss_type`. `num_tokens` counts loss tokens."""
    normalizers = {"dapo": num_tokens, "grpo": num_completions, "dr_grpo": num_completions * rl.max_completion_length}
    return max(1.0, float(normalizers[rl.loss_type]))

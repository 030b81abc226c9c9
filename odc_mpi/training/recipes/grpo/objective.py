"""GRPO (arXiv 2402.03300): advantages compare the completions of a prompt with each other.

The loss of a token is that of TRL's `GRPOTrainer` with one update per rollout, so on-policy the probability ratio is 1
and clipping has no effect. The gradient is that of -advantage * log-probability, plus beta times the KL divergence from
a reference policy. If beta is 0, a group whose rewards are all equal has no gradient. It is not trained on, but counts
in the normalizer.
"""

import torch

from odc_mpi.data.groups import GroupMicrobatch
from odc_mpi.observe.callback import Step
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.training.recipes.rollouts.objective import RolloutObjective, TokenTerms
from odc_mpi.training.recipes.rollouts.settings import RLConfig
from odc_mpi.training.reference_policy import ReferenceFn


class GRPOObjective(RolloutObjective):
    """GRPO loss for minibatches of at most `num_groups` prompt groups, normalized by counts from `RolloutSource`."""

    def __init__(
        self, module: torch.nn.Module, rl: RLConfig, num_groups: int, reference: ReferenceFn | None = None
    ) -> None:
        super().__init__(module, rl, num_groups, reference, () if reference is None else ("grpo_kl",))

    def terms(self, microbatch: GroupMicrobatch, logps: torch.Tensor, other: torch.Tensor | None) -> TokenTerms:
        """Return the advantages of the tokens' completions and, with a reference, the KL divergence times beta."""
        advantages = microbatch.columns["advantage"].float()[microbatch.answers]
        if other is None:
            return TokenTerms(advantages)
        kl = kl_k3(logps, other)
        return TokenTerms(advantages, self._rl.beta * kl, (kl.detach().sum(),))

    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        """Compute the normalizer and the metrics, also the KL divergence if there is a reference."""
        super().on_gathered(step, gathered)
        if self._other is not None:
            step.metrics["kl"] = self.reduce(gathered)["grpo_kl"] / max(1.0, gathered.sum("trained_tokens"))


def kl_k3(logps: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the k3 estimate (http://joschu.net/blog/kl-approx.html), `[K]`, of the KL divergence from `reference`."""
    difference = reference - logps
    return torch.expm1(difference) - difference  # exp(x) - 1 - x would be noise if the policies are similar

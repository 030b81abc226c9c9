"""GRPO (arXiv 2402.03300): advantages compare the completions of a prompt with each other.

The loss of a token is that of TRL's `GRPOTrainer` with one update per rollout, so on-policy the probability ratio is 1
and clipping has no effect. The gradient is that of -advantage * log-probability, plus beta times the KL divergence from
a reference policy. If beta is 0, a group whose rewards are all equal has no gradient. It is not trained on, but counts
in the normalizer.
"""

import torch

from odc_mpi.data.groups import GroupMicrobatch
from odc_mpi.training.recipes.rollouts.objective import RolloutObjective


class GRPOObjective(RolloutObjective):
    """GRPO loss for minibatches of at most `num_groups` prompt groups, normalized by counts from `RolloutSource`."""

    def advantages(
        self, microbatch: GroupMicrobatch, logps: torch.Tensor, other: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the advantages of the tokens' completions and, with a reference, estimates of the KL divergence."""
        advantages = microbatch.columns["advantage"].float()[microbatch.answers]
        return advantages, None if other is None else kl_k3(logps, other)


def kl_k3(logps: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the k3 estimate (http://joschu.net/blog/kl-approx.html), `[K]`, of the KL divergence from `reference`."""
    difference = reference - logps
    return torch.expm1(difference) - difference  # exp(x) - 1 - x would be noise if the policies are similar

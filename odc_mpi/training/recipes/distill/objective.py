"""The loss of on-policy distillation (arXiv 2306.13649, with reverse KL divergence; see also arXiv 2402.03300).

The advantage of a token is its log-probability under the teacher minus that under the model. The expectation of the
gradient over the tokens that the model may generate is that of the KL divergence of the model from the teacher at this
position. The value of the loss is its estimate from the generated tokens.
"""

import torch

from odc_mpi.data.groups import GroupMicrobatch
from odc_mpi.training.recipes.rollouts.objective import RolloutObjective


class DistillObjective(RolloutObjective):
    """Loss of distillation, where the other policy is the teacher."""

    def advantages(
        self, microbatch: GroupMicrobatch, logps: torch.Tensor, other: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the tokens' log-probabilities under the teacher minus those under the model, and the opposite."""
        assert other is not None, "there is always a teacher"
        advantages = other - logps.detach()
        return advantages, -advantages

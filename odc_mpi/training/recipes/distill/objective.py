"""The loss of on-policy distillation (arXiv 2306.13649, with reverse KL divergence; see also arXiv 2402.03300).

The advantage of a token is its log-probability under the teacher minus that under the model. The expectation of the
gradient over the tokens that the model may generate is that of the KL divergence of the model from the teacher at this
position. The value of the loss is its estimate from the generated tokens.
"""

import torch

from odc_mpi.data.groups import GroupMicrobatch
from odc_mpi.observe.callback import Step
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.training.recipes.rollouts.objective import RolloutObjective, TokenTerms
from odc_mpi.training.recipes.rollouts.settings import RLConfig
from odc_mpi.training.reference_policy import ReferenceFn


class DistillObjective(RolloutObjective):
    """Loss of distillation from `teacher` for minibatches of at most `num_groups` prompt groups."""

    def __init__(self, module: torch.nn.Module, rl: RLConfig, num_groups: int, teacher: ReferenceFn) -> None:
        super().__init__(module, rl, num_groups, teacher, ("distill_kl",))

    def terms(self, microbatch: GroupMicrobatch, logps: torch.Tensor, other: torch.Tensor | None) -> TokenTerms:
        """Return the differences of the tokens' log-probabilities under the teacher, `other`, and under the model."""
        assert other is not None, "there is always a teacher"
        advantages = other - logps.detach()
        return TokenTerms(advantages, None, (-advantages.sum(),))

    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        """Compute the normalizer and the metrics, also the estimate of the KL divergence from the teacher."""
        super().on_gathered(step, gathered)
        step.metrics["kl"] = self.reduce(gathered)["distill_kl"] / max(1.0, gathered.sum("trained_tokens"))

"""Strictly on-policy GRPO (arXiv 2402.03300): advantages compare the completions of a prompt with each other.

The loss of a token is that of TRL's `GRPOTrainer` with one update per rollout, so the probability ratio is 1 and
clipping has no effect. The gradient is that of -advantage * log-probability, plus beta times the KL divergence from a
reference policy. Losses are summed over the minibatch. The normalizer is not known until all groups are generated, so
each rank divides the gradients of its shards after they are summed. The normalizer depends on `rl.loss_type`:

    dapo       number of loss tokens                                        arXiv 2503.14476
    grpo       number of completions; the loss of a completion is the mean over its tokens
    dr_grpo    number of completions times rl.max_completion_length         arXiv 2503.20783

If beta is 0, a group whose rewards are all equal has no gradient. It is not trained on, but counts in the normalizer.
"""

from collections.abc import Callable
from typing import cast

import torch

from odc_mpi.data.loader import Minibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.models.logps.token_logps import TokenLogps
from odc_mpi.observe.callback import MicrobatchResult, Step
from odc_mpi.rollout.groups import RolloutMicrobatch
from odc_mpi.shard import model as sharded
from odc_mpi.training.loop import Objective
from odc_mpi.training.rl.metrics import GroupSums
from odc_mpi.training.rl.settings import GRPOConfig

#: Function that returns log-probabilities of a microbatch's target tokens under the reference policy, float32 `[K]`.
ReferenceLogpsFn = Callable[[RolloutMicrobatch], torch.Tensor]


class GRPOObjective(Objective):
    """GRPO loss, with a normalizer computed from the token and completion counts that `RolloutSource` gathers.

    `module` is the module of the sharded model. `num_groups` is the maximum number of prompt groups in a minibatch.
    `reference_logps` is required unless `rl.beta` is 0.
    """

    def __init__(
        self, module: torch.nn.Module, rl: GRPOConfig, num_groups: int, reference_logps: ReferenceLogpsFn | None = None
    ) -> None:
        self._token_logps = TokenLogps(module)
        self._rl, self._reference_logps = rl, reference_logps
        self._sums = GroupSums(("grpo_loss", "grpo_kl", "logp_difference"), num_groups)
        self.gathered_names = ("trained_tokens", "logp_difference_max", *self._sums.gathered_names)
        max_completions = num_groups * rl.num_generations
        self.loss_normalizer = loss_normalizer(
            rl, num_tokens=max_completions * rl.max_completion_length, num_completions=max_completions
        )

    def on_step_begin(self, step: Step) -> None:
        """Reset all sums for this step."""
        self._sums.reset()
        self._positions = {index: position for position, index in enumerate(step.minibatch.indices.tolist())}
        self._largest_difference, self._num_tokens = 0.0, 0

    def loss(self, model: sharded.ShardedModel, minibatch: Minibatch, microbatch: Microbatch) -> torch.Tensor:
        """Return the loss of a microbatch, summed over its tokens and not yet normalized. One-sided."""
        microbatch = cast(RolloutMicrobatch, microbatch)
        logps = self._token_logps(
            microbatch.inputs, microbatch.logit_positions, microbatch.targets, self._rl.temperature
        ).logps
        # The log-probabilities from sampling are those of the same policy.
        differences = (logps.detach() - microbatch.logps).abs()
        statistics = [differences.sum(), differences.max()]
        sequence = microbatch.sequence
        per_token = policy_loss(logps, microbatch.advantages.float()[sequence])
        if self._reference_logps is not None:
            kl = kl_k3(logps, self._reference_logps(microbatch))
            statistics.append(kl.detach().sum())
            per_token = per_token + self._rl.beta * kl
        if self._rl.loss_type == "grpo":
            per_token = per_token / torch.bincount(sequence).to(torch.float32)[sequence]
        self.statistics = torch.stack(statistics)
        return per_token.sum()

    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        """Add the loss and the statistics of a microbatch to those of this step."""
        difference, largest_difference, *kl = result.statistics
        self._num_tokens += result.microbatch.num_tokens
        self._largest_difference = max(self._largest_difference, largest_difference)
        values = {"grpo_loss": result.loss, "logp_difference": difference} | dict(zip(["grpo_kl"], kl, strict=False))
        for name, value in values.items():
            self._add(name, result.microbatch, value)

    def local_values(self) -> tuple[float, ...]:
        """Return this rank's values, in the order of `gathered_names`."""
        return float(self._num_tokens), self._largest_difference, *self._sums.local_values()

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Compute `loss_normalizer` from the counts of all ranks, and add the loss and other metrics to the step."""
        loss_tokens, completions = gathered.sum("loss_tokens"), gathered.sum("completions")
        self.loss_normalizer = loss_normalizer(self._rl, num_tokens=loss_tokens, num_completions=completions)
        tokens = max(1.0, gathered.sum("trained_tokens"))
        step.metrics |= {
            "loss": self._sums.total(gathered, "grpo_loss") / self.loss_normalizer,
            "sampling/sampling_logp_difference/mean": self._sums.total(gathered, "logp_difference") / tokens,
            "sampling/sampling_logp_difference/max": float(gathered.per_rank("logp_difference_max").max()),
        }
        if self._reference_logps is not None:
            step.metrics["kl"] = self._sums.total(gathered, "grpo_kl") / tokens

    def _add(self, name: str, microbatch: Microbatch, value: float) -> None:
        """Add a microbatch's value to the sum for its first prompt. In an exact run, it has only one prompt."""
        self._sums.add(name, self._positions[int(microbatch.indices[0])], value)


def policy_loss(logps: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token: -exp(logp - detached logp) * advantage. All tensors have shape `[K]`."""
    return -torch.exp(logps - logps.detach()) * advantages


def kl_k3(logps: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the k3 estimate (http://joschu.net/blog/kl-approx.html) of the KL divergence at each token, `[K]`."""
    difference = reference - logps
    return torch.expm1(difference) - difference  # exp(x) - 1 - x would be noise if the policies are similar


def loss_normalizer(rl: GRPOConfig, *, num_tokens: float, num_completions: float) -> float:
    """Return the divisor of a minibatch's summed loss for `rl.loss_type`, which is at least 1."""
    normalizers = {"dapo": num_tokens, "grpo": num_completions, "dr_grpo": num_completions * rl.max_completion_length}
    return max(1.0, float(normalizers[rl.loss_type]))

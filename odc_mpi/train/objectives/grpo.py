"""GRPO, strictly on-policy: advantages of a prompt's completions against each other (arXiv 2402.03300).

The loss of a token is that of TRL's `GRPOTrainer` with one update per rollout, where the ratio is 1 and clipping does
nothing: the gradient is that of -advantage * log-probability, plus beta times the KL divergence from a reference. What
sums of it are divided by is known only at A, where all groups have been generated; owners divide before the norm:

    dapo       all tokens that are learnt from                              arXiv 2503.14476
    grpo       all completions, each of which is the mean over its tokens
    dr_grpo    all completions, times rl.max_completion_length              arXiv 2503.20783

Groups of equal rewards have no gradient and are not trained, but they count in the divisor.
"""

from collections.abc import Callable
from typing import ClassVar, cast

import torch

from odc_mpi.data.loader import Batch, Minibatch
from odc_mpi.observe.metrics import Column, Entry
from odc_mpi.observe.participant import Ran, Step
from odc_mpi.rollout.groups import RolloutBatch
from odc_mpi.rollout.logps import token_logps
from odc_mpi.shard import model as sharded
from odc_mpi.train.loop import Objective
from odc_mpi.train.rl.group_sums import GroupSums
from odc_mpi.train.rl.settings import RlConfig

#: Log-probabilities of a microbatch's tokens under the reference policy, float32 [K].
Reference = Callable[[RolloutBatch], torch.Tensor]


class Grpo(Objective):
    """Learns from rewards; the source tells what there is to divide by.

    Args:
        rl: The section of the settings.
        num_groups: The most prompt groups of a minibatch.
        reference: Needed with beta.
    """

    columns: ClassVar = (Column("loss", 8, lambda line: f"{line['loss']:.4f}"),)
    summary: ClassVar = {"loss_first": Entry("loss", "first"), "loss_last": Entry("loss", "last")}

    def __init__(self, rl: RlConfig, num_groups: int, reference: Reference | None = None) -> None:
        self._rl, self._reference = rl, reference
        self._sums = GroupSums(("grpo_loss", "grpo_kl", "logp_difference"), num_groups)
        self.names = ("trained_tokens", "logp_difference_max", *self._sums.names)
        self._positions: dict[int, int] = {}
        self._largest_difference, self._num_tokens = 0.0, 0
        most = num_groups * rl.num_generations
        self.divisor = divisor(rl, num_tokens=most * rl.max_completion_length, num_completions=most)

    def begin(self, step: Step) -> None:
        """Start at zero. Local."""
        self._sums.begin()
        self._positions = {index: position for position, index in enumerate(step.minibatch.indices.tolist())}
        self._largest_difference, self._num_tokens = 0.0, 0

    def loss(self, model: sharded.ShardedModel, minibatch: Minibatch, batch: Batch) -> torch.Tensor:
        """Return a microbatch's part of the loss, not yet divided. One-sided."""
        batch = cast(RolloutBatch, batch)
        device = model.device
        places, targets = batch.places.to(device), batch.targets.to(device)
        logps = token_logps(model.module, batch.inputs, places, targets, self._rl.temperature)
        self._compare(logps.detach(), batch)
        sequence = batch.sequence.to(device)
        per_token = policy_loss(logps, batch.advantages.to(device, torch.float32)[sequence])
        if self._reference is not None:
            kl = divergence(logps, self._reference(batch))
            self._add("grpo_kl", batch, float(kl.detach().sum()))
            per_token = per_token + self._rl.beta * kl
        if self._rl.loss_type == "grpo":
            per_token = per_token / torch.bincount(sequence).to(torch.float32)[sequence]
        return per_token.sum()

    def after_microbatch(self, ran: Ran) -> None:
        """Add its loss. Local."""
        self._add("grpo_loss", ran.batch, ran.loss)

    def tell(self) -> tuple[float, ...]:
        """Return this rank's sums. Local."""
        return float(self._num_tokens), self._largest_difference, *self._sums.tell()

    def hear(self, step: Step, told: sharded.Minibatch) -> None:
        """Learn the divisor, and report. Local."""
        learnt_tokens, completions = told.total("learnt_tokens"), told.total("completions")
        self.divisor = divisor(self._rl, num_tokens=learnt_tokens, num_completions=completions)
        tokens = max(1.0, told.total("trained_tokens"))
        step.metrics |= {
            "loss": self._sums.total(told, "grpo_loss") / self.divisor,
            "sampling/sampling_logp_difference/mean": self._sums.total(told, "logp_difference") / tokens,
            "sampling/sampling_logp_difference/max": float(told.per_rank("logp_difference_max").max()),
        }
        if self._reference is not None:
            step.metrics["kl"] = self._sums.total(told, "grpo_kl") / tokens

    def _add(self, name: str, batch: Batch, value: float) -> None:
        """Add a number of a microbatch to the part of its first prompt, of a whole group in an exact run."""
        self._sums.add(name, self._positions[int(batch.indices[0])], value)

    def _compare(self, logps: torch.Tensor, batch: RolloutBatch) -> None:
        """Compare log-probabilities with those of sampling, which are the same policy's."""
        differences = (logps.cpu() - batch.logps).abs()
        self._num_tokens += len(differences)
        self._add("logp_difference", batch, float(differences.sum()))
        self._largest_difference = max(self._largest_difference, float(differences.max()))


def policy_loss(logps: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token, of the same shape: a value of -advantage, and its gradient. Local."""
    return -torch.exp(logps - logps.detach()) * advantages


def divergence(logps: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the estimate k3 of the KL divergence at each token (http://joschu.net/blog/kl-approx.html). Local."""
    difference = reference - logps
    return torch.expm1(difference) - difference  # exp(x) - 1 - x would be noise where policies are alike


def divisor(rl: RlConfig, *, num_tokens: float, num_completions: float) -> float:
    """Return the divisor of the sum over a minibatch, at least 1. Local.

    Args:
        rl: The section of the settings.
        num_tokens: Of completions that are learnt from, over all ranks.
        num_completions: Over all ranks.
    """
    divisors = {
        "dapo": num_tokens,
        "grpo": num_completions,
        "dr_grpo": num_completions * rl.max_completion_length,
    }
    return max(1.0, float(divisors[rl.loss_type]))

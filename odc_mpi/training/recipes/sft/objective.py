"""Supervised fine-tuning objective: mean next-token cross entropy over all loss tokens in a minibatch."""

import torch

from odc_mpi.data.loader import PlannedMinibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.models.token_logps import TokenLogps
from odc_mpi.observe.callback import Step
from odc_mpi.observe.metrics import RESULT, Metric
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.training.loop import Objective

#: Bound for `round_for_exact_sum`: sums of losses are exact if the mean loss is below 2**8 times this number.
MAX_EXACT_LOSS = 256.0


class SFTObjective(Objective):
    """Mean cross entropy over all loss tokens in a minibatch, plus the auxiliary router loss, if any."""

    gathered_names = ("loss", "correct_tokens", "entropy")
    max_summand = MAX_EXACT_LOSS
    metrics = (
        *Objective.metrics,
        Metric("mean_token_accuracy", "share of loss tokens that were the most likely", RESULT),
        Metric("entropy", "mean entropy of the predictions in nats", RESULT),
    )

    def __init__(self, module: torch.nn.Module) -> None:
        self._token_logps = TokenLogps(module)

    def loss(self, minibatch: PlannedMinibatch, microbatch: Microbatch) -> torch.Tensor:
        """Return a microbatch's contribution to the mean loss of the minibatch. One-sided."""
        scores = self._token_logps(microbatch.inputs, microbatch.logit_positions, microbatch.targets)
        entropy = scores.entropy.sum() / minibatch.num_tokens
        self.statistics = torch.stack([scores.is_top.sum().double(), entropy.double()])
        loss = -scores.logps.sum() / minibatch.num_tokens
        if scores.router_loss is not None:
            loss = loss + scores.router_loss * (microbatch.num_tokens / minibatch.num_tokens)
        return loss

    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        """Add metrics for the loss tokens of all ranks to the step."""
        loss, num_correct, entropy = self.reduce(gathered).values()
        num_tokens = step.minibatch.num_tokens
        metrics = {"mean_token_accuracy": num_correct / num_tokens, "entropy": entropy, "num_tokens": num_tokens}
        step.metrics |= {"loss": loss, **metrics}

"""Supervised fine-tuning: mean cross entropy of the next token over all loss tokens of the minibatch."""

import torch

from odc_mpi.data.loader import Microbatch, Minibatch
from odc_mpi.observe.callback import MicrobatchResult, Step, round_for_exact_sum
from odc_mpi.shard import model as sharded
from odc_mpi.training.loop import Objective

#: Sums of losses are exact as long as the mean is below 2**8 times this.
MAX_EXACT_LOSS = 256.0


class SFTObjective(Objective):
    """Cross entropy in which all loss tokens of a minibatch have the same weight.

    Their number is known before the first microbatch, so each loss is divided at once.
    """

    gathered_names = ("loss",)

    def on_step_begin(self, step: Step) -> None:
        """Reset the sum of losses."""
        self._loss = 0.0

    def loss(self, model: sharded.ShardedModel, minibatch: Minibatch, microbatch: Microbatch) -> torch.Tensor:
        """Return the part of a microbatch in the loss of the minibatch. One-sided."""
        loss: torch.Tensor = model(**microbatch.inputs).loss * (microbatch.num_tokens / minibatch.num_tokens)
        return loss

    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        """Add the loss of a microbatch."""
        self._loss += round_for_exact_sum(result.loss, MAX_EXACT_LOSS)

    def local_values(self) -> tuple[float]:
        """Return this rank's sum of losses."""
        return (self._loss,)

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Report the loss and the number of loss tokens."""
        step.metrics |= {"loss": gathered.sum("loss"), "num_tokens": step.minibatch.num_tokens}

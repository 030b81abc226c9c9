"""Supervised fine-tuning objective: the mean next-token cross entropy over all loss tokens of a minibatch."""

import torch

from odc_mpi.data.loader import Microbatch, Minibatch
from odc_mpi.observe.callback import MicrobatchResult, Step, round_for_exact_sum
from odc_mpi.shard import model as sharded
from odc_mpi.training.loop import Objective

#: Bound for `round_for_exact_sum`: sums of losses are exact if the mean loss is below 2**8 times this number.
MAX_EXACT_LOSS = 256.0


class SFTObjective(Objective):
    """Cross entropy in which all loss tokens of a minibatch, whose number is known at its start, weigh the same."""

    gathered_names = ("loss",)

    def on_step_begin(self, step: Step) -> None:
        """Set the sum of losses to 0."""
        self._loss = 0.0

    def loss(self, model: sharded.ShardedModel, minibatch: Minibatch, microbatch: Microbatch) -> torch.Tensor:
        """Return the contribution of a microbatch to the mean loss of the minibatch. One-sided."""
        loss: torch.Tensor = model(**microbatch.inputs).loss * (microbatch.num_tokens / minibatch.num_tokens)
        return loss

    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        """Add the loss of a microbatch to the sum of the step."""
        self._loss += round_for_exact_sum(result.loss, MAX_EXACT_LOSS)

    def local_values(self) -> tuple[float]:
        """Return the sum of the losses of this rank's microbatches."""
        return (self._loss,)

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Add the loss and the number of loss tokens to the metrics of the step."""
        step.metrics |= {"loss": gathered.sum("loss"), "num_tokens": step.minibatch.num_tokens}

"""Supervised fine-tuning: cross entropy of the next token, the mean over the trained tokens of the minibatch."""

from typing import ClassVar

import torch

from odc_mpi.data.loader import Microbatch, Minibatch
from odc_mpi.observe.callback import MicrobatchResult, Step, round_for_exact_sum
from odc_mpi.observe.metrics import ProgressColumn, SummaryField
from odc_mpi.shard import model as sharded
from odc_mpi.training.loop import Objective

#: Losses are added up exactly as long as the mean is below 2**8 times this.
MAX_EXACT_LOSS = 256.0


class SFTObjective(Objective):
    """All trained tokens of a minibatch weigh the same, in whatever microbatch they are.

    How many they are is known before the first microbatch, so that every loss is divided at once.
    """

    gathered_names = ("loss",)
    columns: ClassVar = (ProgressColumn("loss", 8, lambda line: f"{line['loss']:.4f}"),)
    summary: ClassVar = {"loss_first": SummaryField("loss", "first"), "loss_last": SummaryField("loss", "last")}

    def on_step_begin(self, step: Step) -> None:
        """Start a sum."""
        self._loss = 0.0

    def loss(self, model: sharded.ShardedModel, minibatch: Minibatch, microbatch: Microbatch) -> torch.Tensor:
        """Return a microbatch's part of the loss. One-sided."""
        loss: torch.Tensor = model(**microbatch.inputs).loss * (microbatch.num_tokens / minibatch.num_tokens)
        return loss

    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        """Add its loss."""
        self._loss += round_for_exact_sum(result.loss, MAX_EXACT_LOSS)

    def local_values(self) -> tuple[float]:
        """Return this rank's part of the loss."""
        return (self._loss,)

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Report the loss."""
        step.metrics |= {"loss": gathered.sum("loss"), "num_tokens": step.minibatch.num_tokens}

"""Supervised fine-tuning: cross entropy of the next token, the mean over the trained tokens of the minibatch."""

from typing import ClassVar

import torch

from odc_mpi.data.loader import Batch, Minibatch
from odc_mpi.observe.metrics import Column, Entry
from odc_mpi.observe.participant import Ran, Step, summable
from odc_mpi.shard import model as sharded
from odc_mpi.train.loop import Objective

#: Losses are added up exactly as long as the mean is below 2**8 times this.
MOST_LOSS = 256.0


class SupervisedFineTuning(Objective):
    """All trained tokens of a minibatch weigh the same, in whatever microbatch they are.

    How many they are is known before the first microbatch, so that every loss is divided at once.
    """

    names = ("loss",)
    columns: ClassVar = (Column("loss", 8, lambda line: f"{line['loss']:.4f}"),)
    summary: ClassVar = {"loss_first": Entry("loss", "first"), "loss_last": Entry("loss", "last")}

    def begin(self, step: Step) -> None:
        """Start a sum. Local."""
        self._loss = 0.0

    def loss(self, model: sharded.ShardedModel, minibatch: Minibatch, batch: Batch) -> torch.Tensor:
        """Return a microbatch's part of the loss. One-sided."""
        loss: torch.Tensor = model(**batch.inputs).loss * (batch.num_tokens / minibatch.num_tokens)
        return loss

    def after_microbatch(self, ran: Ran) -> None:
        """Add its loss. Local."""
        self._loss += summable(ran.loss, MOST_LOSS)

    def tell(self) -> tuple[float]:
        """Return this rank's part of the loss. Local."""
        return (self._loss,)

    def hear(self, step: Step, told: sharded.Minibatch) -> None:
        """Report the loss. Local."""
        step.metrics |= {"loss": told.total("loss"), "num_tokens": step.minibatch.num_tokens}

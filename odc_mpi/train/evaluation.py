"""Evaluation beside the training: when it is due, and the loss over held-out sequences.

An evaluation comes between two steps, when parameters are published: forwards alone, without a graph. A rank fetches
what it needs when it needs it and draws one microbatch after the other, so nobody waits for another but at the end,
where the sums of all ranks meet.

Every trained token of the set weighs the same. (transformers' `Trainer` takes the mean over batches, each by its number
of sequences: with sequences of different lengths that is another number.)
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from odc_mpi.comm.tickets import Tickets
from odc_mpi.data.dataset import Dataset
from odc_mpi.data.loader import Batch, Minibatch
from odc_mpi.data.plan.balance import BALANCES
from odc_mpi.data.plan.cost import Cost
from odc_mpi.data.plan.same_cut import same_cut
from odc_mpi.observe.metrics import Column, Entry
from odc_mpi.observe.participant import Participant, Step, summable
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.train.objectives.sft import MOST_LOSS
from odc_mpi.train.settings import Config, RunConfig


class HeldOut(Participant, ABC):
    """Evaluates before the first step if asked to, every `run.eval_every` steps, and after the last one."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._at_start: dict[str, Any] = {}

    @abstractmethod
    def evaluate(self) -> Mapping[str, Any]:
        """Return the figures, the same on every rank. Collective at the end."""

    def start(self, done: int) -> None:
        """Evaluate before the first step of a run, if that is asked for. Collective."""
        if self._run.eval_on_start and not done:
            self._at_start = {f"{name}_start": value for name, value in self.evaluate().items()}

    def after_step(self, step: Step) -> None:
        """Evaluate, if that is due. Collective."""
        step.metrics |= self._at_start
        self._at_start = {}
        every, number = self._run.eval_every, step.number
        if number == self._run.steps or (every and number % every == 0):
            began = time.perf_counter()
            step.metrics |= self.evaluate()
            step.metrics["eval_s"] = time.perf_counter() - began


class Evaluation(HeldOut):
    """The loss over held-out sequences. Making one is collective.

    Args:
        dataset: Held out; closed with the run.
        cost: Of a sequence.
    """

    columns: ClassVar = (Column("eval", 8, lambda line: f"{line['eval_loss']:.4f}" if "eval_loss" in line else ""),)
    summary: ClassVar = {
        "eval_loss_start": Entry("eval_loss_start", "first"),
        "eval_loss": Entry("eval_loss", "last"),
        "eval_perplexity": Entry("eval_perplexity", "last"),
        "eval_loss_best": Entry("eval_loss", "least"),
        "eval_s": Entry("eval_s", "sum"),
    }

    def __init__(self, config: Config, world: World, model: ShardedModel, dataset: Dataset, cost: Cost) -> None:
        super().__init__(config.run)
        self._world, self._model = world, model
        balance = same_cut("dynamic", cost) if config.run.exact else BALANCES["dynamic"]
        first = np.arange(min(config.data.eval_sequences or len(dataset), len(dataset)))
        plan = balance(dataset.lengths[first], world.size, config.data.max_tokens_per_microbatch, cost)
        self._all = Minibatch.of(dataset, first, plan, world.rank, data_epoch=0, position=0)
        self._tickets = Tickets(world)

    def evaluate(self) -> dict[str, float]:
        """Return the mean loss of a trained token, and its perplexity. Collective at the end, else one-sided."""
        own, training = 0.0, self._model.module.training
        self._model.eval()
        try:
            with torch.no_grad():
                for batch in self._all.batches(self._tickets.draw):
                    own += self._loss(batch)
        finally:
            self._model.train(training)
        total = sum(self._world.gather_objects(own))
        self._tickets.reset()  # all have drawn; nobody draws again before the next B
        loss = total / self._all.num_tokens
        try:
            return {"eval_loss": loss, "eval_perplexity": math.exp(loss)}
        except OverflowError:
            return {"eval_loss": loss, "eval_perplexity": math.inf}

    def close(self) -> None:
        """Close the data set. Local."""
        self._all.dataset.close()

    def _loss(self, batch: Batch) -> float:
        """Return the sum of the losses of a microbatch's trained tokens. One-sided."""
        loss = float(self._model(**batch.to(self._model.device).inputs).loss)
        return summable(loss * batch.num_tokens, MOST_LOSS * self._all.num_tokens)

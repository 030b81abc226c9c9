"""Evaluation between training steps: its schedule, and the loss on held-out sequences.

An evaluation runs forward passes between two steps, after the new parameters are published. Each rank claims one
microbatch after another and fetches parameters on demand. Ranks synchronize only at the end, to gather their sums.

All loss tokens have the same weight. (The `Trainer` of transformers weights the mean loss of each batch by its number
of sequences, so its result differs if sequences differ in length.)
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from odc_mpi.comm.tickets import Tickets
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.loader import Minibatch, find_strategy
from odc_mpi.data.plan.cost import CostModel
from odc_mpi.models.logps.token_logps import TokenLogps
from odc_mpi.observe.callback import Callback, Step, round_for_exact_sum
from odc_mpi.observe.metrics import ProgressColumn, SummaryField
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.damage import DamageFoundError, PlaceholderDataset
from odc_mpi.training.objectives.sft import MAX_EXACT_LOSS
from odc_mpi.training.settings import Config, RunConfig


class PeriodicEvaluator(Callback, ABC):
    """Evaluates every `run.eval_every` steps, after the last step and, with `run.eval_on_start`, before the first."""

    def __init__(self, run: RunConfig, model: ShardedModel) -> None:
        self._run, self._model = run, model

    @abstractmethod
    def evaluate(self) -> Mapping[str, Any]:
        """Evaluate and return the metrics, which are equal on all ranks. Collective."""

    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        """Evaluate before the first step if `run.eval_on_start` is set and the run is not resumed. Collective."""
        if self._run.eval_on_start and not completed_steps:
            self._evaluate_into(metrics)

    def on_step_end(self, step: Step) -> None:
        """Add the metrics of an evaluation to those of the step, if one is due after this step. Collective."""
        every, number = self._run.eval_every, step.number
        if number == self._run.steps or (every and number % every == 0):
            try:
                self._evaluate_into(step.metrics)
            except DamageFoundError as error:  # the step itself is complete, and is recorded
                step.failure = error

    def _evaluate_into(self, metrics: dict[str, Any]) -> None:
        began = time.perf_counter()
        with self._model.spans.span("evaluate"):
            try:
                metrics |= self.evaluate()
            finally:
                metrics["eval_s"] = time.perf_counter() - began


class LossEvaluator(PeriodicEvaluator):
    """Computes the mean loss of held-out sequences. Construction is collective."""

    columns: ClassVar = (ProgressColumn("eval", 8, lambda line: f"{line['eval_loss']:.4f}"),)
    summary: ClassVar = {
        "eval_loss_start": SummaryField("eval_loss", "start"),
        "eval_loss": SummaryField("eval_loss", "last"),
        "eval_perplexity": SummaryField("eval_perplexity", "last"),
        "eval_loss_best": SummaryField("eval_loss", "min"),
        "eval_s": SummaryField("eval_s", "sum"),
    }

    def __init__(
        self,
        config: Config,
        world: World,
        model: ShardedModel,
        dataset: Dataset,
        cost_model: CostModel,
        packs: bool,
    ) -> None:
        super().__init__(config.run, model)
        self._world, self._token_logps = world, TokenLogps(model.module)
        strategy = find_strategy("dynamic", cost_model, exact=config.run.exact, packs=packs)
        first = np.arange(min(config.data.eval_sequences or len(dataset), len(dataset)))
        plan = strategy(dataset.lengths[first], world.size, config.data.max_tokens_per_microbatch, cost_model)
        self._dataset, self._placeholders = dataset, PlaceholderDataset(dataset)
        minibatch = Minibatch.from_indices(dataset, first, plan, world.rank, data_epoch=0, position=0)
        self._minibatch = self._placeholders.apply(minibatch)
        self._tickets = Tickets(world)

    def evaluate(self) -> dict[str, float]:
        """Return the mean loss per loss token, the perplexity and the mean token accuracy. Collective.

        Ranks wait only at the end. Raises `DamageFoundError` on every rank if a rank could not read a sequence.
        """
        local_loss, num_correct, training = 0.0, 0, self._model.module.training
        num_tokens, max_magnitude = self._minibatch.num_tokens, MAX_EXACT_LOSS * self._minibatch.num_tokens
        self._model.eval()
        try:
            with torch.no_grad():
                for microbatch in self._minibatch.microbatches(self._tickets.draw):
                    moved = microbatch.to(self._model.device)
                    scores = self._token_logps(moved.inputs, moved.logit_positions, moved.targets)
                    local_loss += round_for_exact_sum(-float(scores.logps.sum()), max_magnitude)
                    num_correct += int(scores.is_top.sum())
        finally:
            self._model.train(training)
        losses, counts = zip(*self._world.gather_objects((local_loss, num_correct)), strict=True)
        self._placeholders.raise_damage(self._world)
        self._tickets.reset()  # all ranks are done, and claim again only after the next parameters are published
        loss, accuracy = sum(losses) / num_tokens, sum(counts) / num_tokens
        try:
            perplexity = math.exp(loss)
        except OverflowError:
            perplexity = math.inf
        return {"eval_loss": loss, "eval_perplexity": perplexity, "eval_mean_token_accuracy": accuracy}

    def close(self) -> None:
        """Close the held-out data set."""
        self._dataset.close()

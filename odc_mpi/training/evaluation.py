"""Evaluation between training steps: its schedule, and forward passes over held-out data. Recipes define the metrics.

An evaluation runs forward passes between two steps, after the new parameters are published. Each rank claims one
microbatch at a time and fetches parameters on demand. Ranks synchronize only at the end, to gather their results. All
loss tokens have the same weight. (The `Trainer` of transformers weights a batch's mean by its number of sequences.)
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from odc_mpi.comm.tickets import Tickets
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.loader import PlannedMinibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.data.plan.balance import find_strategy
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.metrics import RESULT, SPEED, Metric
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.context import RunContext
from odc_mpi.training.inputs import initial_cost_model
from odc_mpi.training.settings import RunConfig
from odc_mpi.training.source import DamageFoundError, PlaceholderDataset

S = TypeVar("S")
T = TypeVar("T")


class PeriodicEvaluator(Callback, ABC):
    """Base class for callbacks that evaluate the model every `run.eval_every` steps and after the last step."""

    metrics: Sequence[Metric] = (Metric("eval_s", "evaluating", SPEED, "sum"),)

    def __init__(self, run: RunConfig, model: ShardedModel) -> None:
        self._run, self._model = run, model
        #: Returns a context manager in which the model has the parameters to evaluate. Entering it is collective.
        self.evaluated_parameters: Callable[[], AbstractContextManager[None]] = nullcontext

    @abstractmethod
    def evaluate(self) -> Mapping[str, Any]:
        """Evaluate the model and return the metrics, which are equal on all ranks. Collective."""

    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        """Evaluate before the first step if `run.eval_on_start` is set and the run is not resumed. Collective."""
        if self._run.eval_on_start and not completed_steps:
            self._evaluate_into(metrics)

    def on_step_end(self, step: Step) -> None:
        """If an evaluation is due after this step, run it and add its metrics to the step's metrics. Collective."""
        every, number = self._run.eval_every, step.number
        if number == self._run.steps or (every and number % every == 0):
            try:
                self._evaluate_into(step.metrics)
            except DamageFoundError as error:  # the step itself is complete, and is recorded
                step.failure = error

    def _evaluate_into(self, metrics: dict[str, Any]) -> None:
        seconds = self._model.spans.seconds
        before_s = seconds["evaluate"]
        try:
            with self._model.spans.span("evaluate"), self.evaluated_parameters():
                metrics |= self.evaluate()
        finally:
            metrics["eval_s"] = seconds["evaluate"] - before_s


class ForwardPass:
    """Runs forward passes over sequences in `dataset`. Ranks claim the microbatches. Construction is collective."""

    def __init__(self, context: RunContext, dataset: Dataset) -> None:
        config, world, inputs = context.config, context.world, context.inputs
        self.dataset = dataset
        #: Indices of the sequences that an evaluation uses, int64 `[n]`.
        limit = config.data.eval_sequences or len(dataset)
        self.eval_indices = np.arange(len(dataset))[inputs.part.index : limit : inputs.part.count]
        self._world, self._model = world, context.model
        # Not the fitted cost of a resumed run: microbatches, and so the digits of the loss, would change.
        self._cost_model = initial_cost_model(config.data, inputs.model)
        self._max_tokens = config.data.max_tokens_per_microbatch
        packs, rows = inputs.model.packing.packs, dataset.kind == "sequences" and inputs.model.packing.pads_rows
        self._strategy = find_strategy("dynamic", self._cost_model, exact=config.run.exact, packs=packs, rows=rows)
        self._placeholders = PlaceholderDataset(dataset)
        self._tickets = Tickets(world)

    def plan(self, indices: npt.NDArray[np.int64]) -> PlannedMinibatch:
        """Plan a minibatch for `run` from the sequences at `indices`, int64 `[n]`, which must be equal on all ranks."""
        world = self._world
        plan = self._strategy(self.dataset.lengths[indices], world.size, self._max_tokens, self._cost_model)
        return self._placeholders.apply(PlannedMinibatch(0, 0, indices, plan, world.rank, self.dataset))

    def run(self, minibatch: PlannedMinibatch, score: Callable[[Microbatch], T]) -> list[T]:
        """Call `score` on each microbatch without gradients, and return the results of all ranks. Collective.

        The results must be picklable, and are returned in no particular order. The ranks must synchronize before the
        next call. Raises `DamageFoundError` on every rank if any rank could not read a sequence.
        """
        results, training = [], self._model.module.training
        self._model.eval()
        try:
            with torch.no_grad():
                for microbatch in minibatch.microbatches(self._tickets.draw):
                    results.append(score(microbatch.to(self._model.device)))
        finally:
            self._model.train(training)
        gathered = self._world.gather_objects(results)
        self._placeholders.raise_damage(self._world)
        self._tickets.reset()  # all ranks are done, and claim again only after they have synchronized again
        return list(itertools.chain.from_iterable(gathered))

    def columns(self, minibatch: PlannedMinibatch, score: Callable[[Microbatch], torch.Tensor]) -> list[tuple]:
        """Call `score` as in `run`, which returns `k` values for each sample, `[n, k]`, and return `k` columns.

        Each has the values of all samples in their order, whichever rank computed which. Collective.
        """

        def rows(microbatch: Microbatch) -> list[tuple[int, list[float]]]:
            return list(zip(microbatch.indices.tolist(), score(microbatch).tolist(), strict=True))

        found = sorted(itertools.chain.from_iterable(self.run(minibatch, rows)))
        return list(zip(*(values for _, values in found), strict=True))


def held_out_pass(context: RunContext) -> ForwardPass | None:
    """Return a forward pass over the held-out sequences, or None if the run has none. Collective."""
    dataset = context.inputs.evaluation
    return ForwardPass(context, dataset) if isinstance(dataset, Dataset) else None


class HeldOutEvaluator(PeriodicEvaluator, Generic[S]):
    """Base class for callbacks that evaluate held-out sequences or pairs with `scorer`."""

    metrics: Sequence[Metric] = (
        Metric(
            "eval_loss",
            "held-out loss",
            RESULT,
            "start final best",
            "{:.4f}",
            ("eval", 8),
            "eval loss",
            "watch tile",
            "low",
        ),
        *PeriodicEvaluator.metrics,
    )

    def __init__(self, run: RunConfig, model: ShardedModel, forward_pass: ForwardPass, scorer: S) -> None:
        super().__init__(run, model)
        self._forward_pass, self._scorer = forward_pass, scorer
        self._minibatch = forward_pass.plan(forward_pass.eval_indices)

    def close(self) -> None:
        """Close the held-out data set."""
        self._forward_pass.dataset.close()

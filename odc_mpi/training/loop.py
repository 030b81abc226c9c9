"""The training loop, independent of the algorithm.

    MinibatchSource   yields minibatches, and this rank's microbatches of each minibatch
    Objective         computes the loss of a microbatch
    Update            clips gradients and runs the optimizer
    Callback          anything else with hooks in the loop; the three classes above are callbacks, too

A step runs the microbatches (one-sided), completes the gradients (collective), computes their norm if they are clipped
(collective), runs the optimizer, and publishes the parameters (collective). See docs/ordering.md.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from typing_extensions import override

from odc_mpi.data.loader import PlannedMinibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.observe.callback import Callback, MicrobatchResult, Step, round_for_exact_sum
from odc_mpi.observe.metrics import RESULT, SPEED, Metric
from odc_mpi.observe.timing import StepTimes
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.update import Update


class MinibatchSource(Callback, ABC):
    """Base class for minibatch sources. Subclasses report the metric `num_input_tokens`."""

    metrics: Sequence[Metric] = (
        Metric(
            "num_input_tokens",
            "tokens",
            SPEED,
            "sum",
            "{:,.0f}, {tokens_per_s:,.0f} per second",
            None,
            "tokens",
            "",
            "",
            "tokens",
        ),
    )

    @abstractmethod
    def next_minibatch(self) -> PlannedMinibatch:
        """Return the next minibatch, which is the same on every rank. Does not communicate."""

    @abstractmethod
    def microbatches(self, minibatch: PlannedMinibatch) -> Iterable[Microbatch]:
        """Yield this rank's microbatches. The caller must train on each before getting the next. May be one-sided."""

    def num_microbatches(self, minibatch: PlannedMinibatch) -> int | None:
        """Return the number of this rank's microbatches, or None if it is not known in advance."""
        return None


class Objective(Callback, ABC):
    """Base class for training objectives, which compute the loss to minimize. Subclasses report the metric `loss`.

    `gathered_names` names the loss, followed by the `statistics`. These values are summed over the microbatches of a
    step, or reduced by `extremes`. Summands are rounded so that sums do not depend on the order of the microbatches.

    Attributes:
        extremes: `min` or `max`, keyed by the names of statistics for which it is reported instead of the sum.
        max_summand: Bound for `round_for_exact_sum`: sums are exact as long as they are below 2**8 times this number.
        loss_normalizer: Divisor for the summed gradients. `on_gathered` may lower it.
        statistics: Tensor `[k]` of other values from the last microbatch, such as metrics, on the model's device. Set
            by `loss`. `on_microbatch_end` gets it as `MicrobatchResult.statistics`, so `loss` need not wait for a GPU.
    """

    metrics: Sequence[Metric] = (
        Metric("loss", "loss", RESULT, "first last", "{:.4f}", ("loss", 8), row="loss", views="watch tile"),
        Metric("num_tokens", "loss tokens of the step", SPEED),
    )
    extremes: ClassVar[Mapping[str, Callable[[Iterable[float]], float]]] = {}
    max_summand: ClassVar[float] = 2.0**16
    loss_normalizer: float = 1.0
    statistics: torch.Tensor = torch.empty(0)

    @abstractmethod
    def loss(self, minibatch: PlannedMinibatch, microbatch: Microbatch) -> torch.Tensor:
        """Return the scalar loss of a microbatch on the model's device, not divided by `loss_normalizer`. One-sided."""

    @override
    def on_step_begin(self, step: Step) -> None:
        initial: dict[Any, float] = {min: math.inf, max: -math.inf}
        self._values = {name: initial.get(self.extremes.get(name), 0.0) for name in self.gathered_names}

    @override
    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        for name, value in zip(self.gathered_names, (result.loss, *result.statistics), strict=True):
            if reduce := self.extremes.get(name):
                self._values[name] = reduce((self._values[name], value))
            else:
                self._values[name] += round_for_exact_sum(value, self.max_summand)

    @override
    def local_values(self) -> Sequence[float]:
        return tuple(self._values.values())

    def reduce(self, gathered: MinibatchStats) -> dict[str, float]:
        """Return the loss and statistics, reduced over all ranks' microbatches and keyed by `gathered_names`."""
        return {
            name: self.extremes[name](gathered.per_rank(name).tolist()) if name in self.extremes else gathered.sum(name)
            for name in self.gathered_names
        }


class Trainer(AbstractContextManager["Trainer"]):
    """Runs training steps. As a context manager, it closes all callbacks on exit.

    The attribute `callbacks` lists `objective`, `update`, `source` and `times`, followed by the argument `callbacks`.
    The list can be extended until `start` is called. Hooks are called in this order, except `on_train_end`, which is
    called in reverse order.
    """

    def __init__(
        self,
        model: ShardedModel,
        source: MinibatchSource,
        objective: Objective,
        update: Update,
        times: StepTimes,
        callbacks: Iterable[Callback],
        completed_steps: int = 0,
    ) -> None:
        self.model = model
        self.update = update
        self._source, self.objective, self._times = source, objective, times
        self.callbacks: list[Callback] = [objective, update, source, times, *callbacks]
        self.completed_steps = completed_steps

    def step(self) -> dict[str, Any]:
        """Train on the next minibatch and return the metrics. Collective. Raises `Step.failure` if a hook set it."""
        metrics: dict[str, Any] = {"step": self.completed_steps + 1}
        with self._times.measure(metrics):
            step = Step(self.completed_steps + 1, self._source.next_minibatch(), metrics)
            finite = self._run_microbatches(step)
            self.update.run(step, self.objective.loss_normalizer, finite=finite)
            for callback in self.callbacks:
                callback.on_optimizer_step(step)
            self.model.publish()
        self.completed_steps += 1
        for callback in self.callbacks:
            callback.on_step_end(step)
        if step.failure:
            raise step.failure
        return step.metrics

    def start(self) -> None:
        """Call `on_train_begin` on all callbacks. Collective. Raises `ValueError` if their `gathered_names` overlap."""
        metrics: dict[str, Any] = {"step": self.completed_steps}
        names = Counter(name for callback in self.callbacks for name in callback.gathered_names)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"expected different gathered_names in all callbacks, got {', '.join(twice)} twice")
        for callback in self.callbacks:
            callback.on_train_begin(self.completed_steps, metrics)

    def finish(self) -> dict[str, Any]:
        """Call `on_train_end` on all callbacks in reverse order, and return their summary entries. Collective."""
        return {key: value for callback in reversed(self.callbacks) for key, value in callback.on_train_end().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the merged, JSON-serializable states of all callbacks, excluding the model and the optimizer."""
        return {key: value for callback in self.callbacks for key, value in callback.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the states of all callbacks from `state_dict`. Raises `UserError` if they do not match this run."""
        for callback in self.callbacks:
            callback.load_state_dict(state_dict)

    def tensors(self) -> dict[str, Mapping[str, torch.Tensor]]:
        """Return the merged tensors of all callbacks (see `Callback.tensors`)."""
        return {section: tensors for callback in self.callbacks for section, tensors in callback.tensors().items()}

    def __exit__(self, *_: object) -> None:
        for callback in self.callbacks:
            callback.close()

    def _run_microbatches(self, step: Step) -> bool:
        """Run this rank's microbatches and complete the gradients. Return True if they are finite on all ranks."""
        names = (name for callback in self.callbacks for name in callback.gathered_names)
        with self.model.minibatch(*names) as gathered:  # complete gradients on exit (A in docs/ordering.md)
            for callback in self.callbacks:
                callback.on_step_begin(step)
            count = self._source.num_microbatches(step.minibatch)
            for number, microbatch in enumerate(self._source.microbatches(step.minibatch), 1):
                if number == count:
                    self.model.set_is_last_backward()
                self._run(step, microbatch)
            self._report(self._times.microbatches.drain())
            for callback in self.callbacks:
                gathered.local.update(zip(callback.gathered_names, callback.local_values(), strict=True))
        for callback in self.callbacks:
            callback.on_gathered(step, gathered)
        return gathered.finite

    def _run(self, step: Step, microbatch: Microbatch) -> None:
        self._times.microbatches.begin()
        loss = self.objective.loss(step.minibatch, microbatch.to(self.model.device))
        loss.backward()
        statistics = self.objective.statistics.detach().to(loss.device, torch.float64)
        values = torch.cat([loss.detach().double()[None], statistics])
        self._report(self._times.microbatches.end(microbatch, values))

    def _report(self, results: Iterable[MicrobatchResult]) -> None:
        for result in results:
            for callback in self.callbacks:
                callback.on_microbatch_end(result)

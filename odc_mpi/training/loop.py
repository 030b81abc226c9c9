"""The loop of a training run, which knows four things and no algorithm.

    Source        where minibatches come from, and which of their microbatches are this rank's
    Objective     the loss of a microbatch
    Update        from gradients to published parameters
    Participant   whoever has something to tell at point A, or to do between steps; the three above are, too

A step: microbatches (one-sided), A, N if gradients are clipped, optimizer (local), B. See docs/ordering.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any

import torch

from odc_mpi.data.loader import Microbatch, Minibatch
from odc_mpi.observe.callback import Callback, MicrobatchResult, Step
from odc_mpi.shard import model as sharded
from odc_mpi.training.update import Update


class MinibatchSource(Callback, ABC):
    """Where minibatches come from; its `state_dict` is that of the next one."""

    @abstractmethod
    def next_minibatch(self) -> Minibatch:
        """Return the next minibatch, the same on every rank. Local, or one-sided."""

    @abstractmethod
    def microbatches(self, minibatch: Minibatch) -> Iterable[Microbatch]:
        """Yield this rank's microbatches, each when the one before it is done. Local, or one-sided."""

    def num_microbatches(self, minibatch: Minibatch) -> int | None:
        """Return how many microbatches this rank will run; None if that is open."""
        return None


class Objective(Callback, ABC):
    """What is minimized.

    Attributes:
        loss_normalizer: Of the summed gradients of all microbatches. An objective that knows it only when all ranks have told
            their part sets it in `hear`; the owners divide before the norm. Before the first step: the largest.
    """

    loss_normalizer: float = 1.0

    @abstractmethod
    def loss(self, model: sharded.ShardedModel, minibatch: Minibatch, microbatch: Microbatch) -> torch.Tensor:
        """Return the loss of a microbatch, to call backward on. One-sided.

        Args:
            model: Takes what is on its device.
            minibatch: Of which the microbatch is a part.
            microbatch: On the model's device.
        """


class Trainer(AbstractContextManager["Trainer"]):
    """A model in training; leaving it as a context closes the participants.

    Args:
        model: After point B.
        source: Of minibatches.
        objective: Makes a loss of a microbatch.
        update: Of the model's slices.
        callbacks: More who take part in each step; they come to each stage of it in this order, after the three.
        clock: Returns seconds of this rank's own work: fetches and pushes included, waits for slower ranks not.
        completed_steps: Steps that were done before.

    Attributes:
        callbacks: All of them, the objective, the update and the source first; more may join.
        update: As given.
        completed_steps: Steps that are done.
    """

    def __init__(
        self,
        model: sharded.ShardedModel,
        source: MinibatchSource,
        objective: Objective,
        update: Update,
        callbacks: Iterable[Callback],
        clock: Callable[[], float],
        completed_steps: int = 0,
    ) -> None:
        self.model = model
        self.update = update
        self._source, self._objective = source, objective
        self.callbacks: list[Callback] = [objective, update, source, *callbacks]
        self._clock = clock
        self.completed_steps = completed_steps

    def step(self) -> dict[str, Any]:
        """Train on the next minibatch. Collective, at the ordering points, and as the participants' `on_step_end` is.

        Returns:
            The metrics.
        """
        began = perf_counter()
        step = Step(self.completed_steps + 1, self._source.next_minibatch(), {"step": self.completed_steps + 1})
        finite = self._run_microbatches(step)
        self.update.run(step, self._objective.loss_normalizer, finite=finite)
        self.completed_steps += 1
        step.metrics["step_s"] = perf_counter() - began
        for callback in self.callbacks:
            callback.on_step_end(step)
        return step.metrics

    def start(self) -> None:
        """Have all participants prepare for the steps to come. Collective, as `Callback.start` is.

        Raises:
            ValueError: Two of them tell a number of the same name, of which only one would be heard.
        """
        callback_by_name: dict[str, Callback] = {}
        for callback in self.callbacks:
            for name in callback.gathered_names:
                if (other := callback_by_name.setdefault(name, callback)) is not callback:
                    both = f"{type(other).__name__} and {type(callback).__name__}"
                    raise ValueError(f"expected a name of each participant's own at point A, got {name!r} of {both}")
        for callback in self.callbacks:
            callback.on_train_begin(self.completed_steps)

    def finish(self) -> dict[str, Any]:
        """End all participants, the last first, and return what they tell of the run. Collective."""
        return {key: value for callback in reversed(self.callbacks) for key, value in callback.on_train_end().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run besides model and optimizer, as JSON takes it."""
        return {key: value for callback in self.callbacks for key, value in callback.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        for callback in self.callbacks:
            callback.load_state_dict(state_dict)

    def __exit__(self, *_: object) -> None:
        for callback in self.callbacks:
            callback.close()

    def _run_microbatches(self, step: Step) -> bool:
        """Run forward and backward of this rank's microbatches; return whether all ranks' gradients are finite.

        Nobody waits until the end, which is point A.
        """
        with self.model.minibatch(
            *(name for callback in self.callbacks for name in callback.gathered_names)
        ) as gathered:
            for callback in self.callbacks:
                callback.on_step_begin(step)
            count = self._source.num_microbatches(step.minibatch)
            for number, microbatch in enumerate(self._source.microbatches(step.minibatch), 1):
                if number == count:
                    self.model.set_is_last_backward()
                self._run(step, microbatch)
            for callback in self.callbacks:
                gathered.local.update(zip(callback.gathered_names, callback.local_values(), strict=True))
        for callback in self.callbacks:
            callback.on_gathered(step, gathered)
        return gathered.finite

    def _run(self, step: Step, microbatch: Microbatch) -> None:
        began, busy_s = perf_counter(), self._clock()
        loss = self._objective.loss(self.model, step.minibatch, microbatch.to(self.model.device))
        loss.backward()
        value = loss.item()  # before the clock: on a GPU it waits for what has only been launched
        result = MicrobatchResult(microbatch, value, began, perf_counter(), self._clock() - busy_s)
        for callback in self.callbacks:
            callback.on_microbatch_end(result)

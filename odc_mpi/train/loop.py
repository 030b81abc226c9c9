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

from odc_mpi.data.loader import Batch, Minibatch
from odc_mpi.observe.participant import Participant, Ran, Step
from odc_mpi.shard import model as sharded
from odc_mpi.train.update import Update


class Source(Participant, ABC):
    """Where minibatches come from; its `state` is that of the next one."""

    @abstractmethod
    def draw(self) -> Minibatch:
        """Return the next minibatch, the same on every rank. Local, or one-sided."""

    @abstractmethod
    def microbatches(self, minibatch: Minibatch) -> Iterable[Batch]:
        """Yield this rank's microbatches, each when the one before it is done. Local, or one-sided."""

    def num_microbatches(self, minibatch: Minibatch) -> int | None:
        """Return how many microbatches this rank will run; None if that is open. Local."""
        return None


class Objective(Participant, ABC):
    """What is minimized.

    Attributes:
        divisor: Of the summed gradients of all microbatches. An objective that knows it only when all ranks have told
            their part sets it in `hear`; the owners divide before the norm. Before the first step: the largest.
    """

    divisor: float = 1.0

    @abstractmethod
    def loss(self, model: sharded.ShardedModel, minibatch: Minibatch, batch: Batch) -> torch.Tensor:
        """Return the loss of a microbatch, to call backward on. One-sided.

        Args:
            model: Takes what is on its device.
            minibatch: Of which the microbatch is a part.
            batch: On the model's device.
        """


class Trainer(AbstractContextManager["Trainer"]):
    """A model in training; leaving it as a context closes the participants.

    Args:
        model: After point B.
        source: Of minibatches.
        objective: Makes a loss of a microbatch.
        update: Of the model's slices.
        participants: More who take part in each step; they come to each stage of it in this order, after the three.
        clock: Returns seconds of this rank's own work: fetches and pushes included, waits for slower ranks not.
        done: Steps that were done before.

    Attributes:
        participants: All of them, the objective, the update and the source first; more may join.
        update: As given.
        done: Steps that are done.
    """

    def __init__(
        self,
        model: sharded.ShardedModel,
        source: Source,
        objective: Objective,
        update: Update,
        participants: Iterable[Participant],
        clock: Callable[[], float],
        done: int = 0,
    ) -> None:
        self.model = model
        self.update = update
        self._source, self._objective = source, objective
        self.participants: list[Participant] = [objective, update, source, *participants]
        self._clock = clock
        self.done = done

    def step(self) -> dict[str, Any]:
        """Train on the next minibatch. Collective, at the ordering points, and as the participants' `after_step` is.

        Returns:
            The metrics.
        """
        began = perf_counter()
        step = Step(self.done + 1, self._source.draw(), {"step": self.done + 1})
        finite = self._run_microbatches(step)
        self.update.run(step, self._objective.divisor, finite=finite)
        self.done += 1
        step.metrics["step_s"] = perf_counter() - began
        for participant in self.participants:
            participant.after_step(step)
        return step.metrics

    def start(self) -> None:
        """Have all participants prepare for the steps to come. Collective, as `Participant.start` is.

        Raises:
            ValueError: Two of them tell a number of the same name, of which only one would be heard.
        """
        tellers: dict[str, Participant] = {}
        for participant in self.participants:
            for name in participant.names:
                if (other := tellers.setdefault(name, participant)) is not participant:
                    both = f"{type(other).__name__} and {type(participant).__name__}"
                    raise ValueError(f"expected a name of each participant's own at point A, got {name!r} of {both}")
        for participant in self.participants:
            participant.start(self.done)

    def finish(self) -> dict[str, Any]:
        """End all participants, the last first, and return what they tell of the run. Collective."""
        return {key: value for each in reversed(self.participants) for key, value in each.finish().items()}

    def state(self) -> dict[str, Any]:
        """Return the state of the run besides model and optimizer, as JSON takes it. Local."""
        return {key: value for each in self.participants for key, value in each.state().items()}

    def load_state(self, about: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Local."""
        for participant in self.participants:
            participant.load_state(about)

    def __exit__(self, *_: object) -> None:
        for participant in self.participants:
            participant.close()

    def _run_microbatches(self, step: Step) -> bool:
        """Run forward and backward of this rank's microbatches; return whether all ranks' gradients are finite.

        Nobody waits until the end, which is point A.
        """
        with self.model.minibatch(*(name for each in self.participants for name in each.names)) as told:
            for participant in self.participants:
                participant.begin(step)
            count = self._source.num_microbatches(step.minibatch)
            for number, batch in enumerate(self._source.microbatches(step.minibatch), 1):
                if number == count:
                    self.model.set_is_last_backward()
                self._run(step, batch)
            for participant in self.participants:
                told.values.update(zip(participant.names, participant.tell(), strict=True))
        for participant in self.participants:
            participant.hear(step, told)
        return told.finite

    def _run(self, step: Step, batch: Batch) -> None:
        began, own_s = perf_counter(), self._clock()
        loss = self._objective.loss(self.model, step.minibatch, batch.to(self.model.device))
        loss.backward()
        value = loss.item()  # before the clock: on a GPU it waits for what has only been launched
        ran = Ran(batch, value, began, perf_counter(), self._clock() - own_s)
        for participant in self.participants:
            participant.after_microbatch(ran)

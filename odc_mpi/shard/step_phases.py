"""Phases of a training step, and the time that the computing thread spends on communication and other activities.

This time is recorded as spans of the computing thread. Spans of communication do not overlap:

    fetch                  waiting for parameters
    accumulate             starting pushes, and waiting for pushes
    gradients_complete, grad_norm, parameters_published
                           waiting at the synchronization points

Spans of activities do not overlap each other, but contain the communication during the activity:

    generate, rollout_wait generating completions with their rewards, and waiting for completions of other ranks
    optimize               the optimizer step
    evaluate, save         an evaluation, and copying the state for a checkpoint

Spans of sharding count only towards the total times:

    windows, weights       allocating the windows, and loading the parameters
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from time import perf_counter
from typing import NamedTuple

#: The synchronization points of a step, in order: A, N and B of docs/ordering.md.
SYNC_POINTS = ("gradients_complete", "grad_norm", "parameters_published")
ACTIVITIES = ("generate", "rollout_wait", "optimize", "evaluate", "save")
SHARDING = ("windows", "weights")
#: Kinds of spans, as described in the module docstring.
SPAN_KINDS = ("fetch", "accumulate", *SYNC_POINTS, *ACTIVITIES)


class Span(NamedTuple):
    """Interval of a kind in `SPAN_KINDS`. `began` and `ended` are values of `time.perf_counter`, in seconds."""

    kind: str
    began: float
    ended: float


class SpanRecorder:
    """Recorder of time intervals (spans) in which the computing thread communicates or does another activity.

    `seconds` maps the kind of a span to the total time of all such spans so far, in seconds.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*SPAN_KINDS, *SHARDING), 0.0)
        self._is_recording = False
        self._recorded: list[Span] = []

    def add(self, kind: str, began: float) -> None:
        """Add a span that began at `began` and ends now. Takes only a fraction of a microsecond."""
        ended = perf_counter()
        self.seconds[kind] += ended - began
        if self._is_recording:
            self._recorded.append(Span(kind, began, ended))

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Context manager that adds a span for the enclosed code, even if the code raises an exception."""
        began = perf_counter()
        try:
            yield
        finally:
            self.add(kind, began)

    def start_recording(self) -> None:
        """Keep each span from now on. Call `drain` regularly to free the memory of the spans."""
        self._is_recording = True

    def drain(self) -> list[Span]:
        """Return the spans recorded since the last call, in order, and remove them."""
        recorded, self._recorded = self._recorded, []
        return recorded


class StepPhase(Enum):
    """Phase of a `ShardedModel`: PUBLISHED -> MINIBATCH -> COMPLETE -> PUBLISHED, and CLOSED at the end."""

    PUBLISHED = "parameters published"
    MINIBATCH = "inside a minibatch"
    COMPLETE = "gradients complete"
    CLOSED = "closed"


class StepPhases:
    """State machine of a training step, which rejects calls in the wrong phase."""

    def __init__(self) -> None:
        self.phase = StepPhase.COMPLETE  # the constructor of `ShardedModel` ends with the first `publish()`

    def require(self, expected: StepPhase, call: str) -> None:
        """Raise RuntimeError if the current phase is not `expected`. The message names the rejected call, `call`."""
        if self.phase is not expected:
            raise RuntimeError(f"{call}: expected the phase {expected.value!r}, got {self.phase.value!r}")

    def advance(self, expected: StepPhase, following: StepPhase, call: str) -> None:
        """Enter the phase `following`. Raises RuntimeError if the current phase is not `expected`."""
        self.require(expected, call)
        self.phase = following

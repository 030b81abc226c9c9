"""Phases of a training step, and the time that the computing thread spends on communication and other activities.

Communication spans do not overlap each other:

    fetch                  waiting for parameters
    accumulate             starting pushes, and waiting for pushes
    gradients_complete, grad_norm, parameters_published
                           waiting at the synchronization points

Activity spans do not overlap each other, either, but include any communication during the activity:

    generate, rollout_wait generating completions with their rewards, and waiting for other ranks' completions
    optimize, outer_sync   the optimizer step, and synchronizing islands that train separately
    evaluate, save         evaluating, and copying the state for a checkpoint

Sharding spans count only toward the total times:

    windows, weights       allocating the windows, and loading the parameters
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from time import perf_counter
from typing import NamedTuple

#: Synchronization points of a step, in order: A, N and B in docs/ordering.md.
SYNC_POINTS = ("gradients_complete", "grad_norm", "parameters_published")
ACTIVITIES = ("generate", "rollout_wait", "optimize", "outer_sync", "evaluate", "save")
SHARDING = ("windows", "weights")
#: Kinds of spans, as described in the module docstring.
SPAN_KINDS = ("fetch", "accumulate", *SYNC_POINTS, *ACTIVITIES)


class Span(NamedTuple):
    """Interval of one of the `SPAN_KINDS`. `began` and `ended` are values of `time.perf_counter`, in seconds."""

    kind: str
    began: float
    ended: float


class SpanRecorder:
    """Recorder for time intervals (spans) in which the computing thread communicates or does something else.

    `seconds` maps each kind of span to the total time of all such spans so far, in seconds.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*SPAN_KINDS, *SHARDING), 0.0)
        self._is_recording = False
        self._recorded: list[Span] = []

    def add(self, kind: str, began: float) -> None:
        """Add a span that began at `began` and ends now."""
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
        """Keep every span from now on. Call `drain` regularly to free the memory of the spans."""
        self._is_recording = True

    def drain(self) -> list[Span]:
        """Remove the spans recorded since the last call, and return them in order."""
        recorded, self._recorded = self._recorded, []
        return recorded


class StepPhase(Enum):
    """Phase of a `ShardedModel`: PUBLISHED -> MINIBATCH -> COMPLETE -> PUBLISHED, and CLOSED at the end."""

    PUBLISHED = "parameters published"
    MINIBATCH = "inside a minibatch"
    COMPLETE = "gradients complete"
    CLOSED = "closed"


class StepPhases:
    """State machine for training steps, which rejects calls in the wrong phase."""

    def __init__(self) -> None:
        self.phase = StepPhase.COMPLETE  # the constructor of `ShardedModel` ends with the first `publish()`

    def require(self, expected: StepPhase, call: str) -> None:
        """Raise RuntimeError if the current phase is not `expected`. `call` names the rejected call in the message."""
        if self.phase is not expected:
            raise RuntimeError(f"{call}: expected the phase {expected.value!r}, got {self.phase.value!r}")

    def advance(self, expected: StepPhase, following: StepPhase, call: str) -> None:
        """Enter the phase `following`. Raises RuntimeError if the current phase is not `expected`."""
        self.require(expected, call)
        self.phase = following

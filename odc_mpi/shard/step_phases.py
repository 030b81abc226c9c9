"""Phases of a training step, and the time that the computing thread does not compute.

All spans belong to the computing thread, so they do not overlap:

    fetch                  waiting for parameters
    accumulate             starting pushes, and waiting for pushes
    gradients_complete, grad_norm, parameters_published
                           waiting at the synchronization points
"""

from collections.abc import Callable
from enum import Enum
from time import perf_counter
from typing import NamedTuple, TypeVar

T = TypeVar("T")

#: The synchronization points of a step, in order: A, N and B of docs/ordering.md.
SYNC_POINTS = ("gradients_complete", "grad_norm", "parameters_published")
#: Kinds of spans.
SPAN_KINDS = ("fetch", "accumulate", *SYNC_POINTS)


class Span(NamedTuple):
    """Interval in seconds of `time.perf_counter`."""

    kind: str
    began: float
    ended: float


class SpanRecorder:
    """Seconds since the start by kind of span and, after `start_recording`, the single spans."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(SPAN_KINDS, 0.0)
        self._is_recording = False
        self._recorded: list[Span] = []

    def add(self, kind: str, began: float) -> None:
        """Add a span that ends now. Takes a fraction of a microsecond, since every fetch and push calls it."""
        ended = perf_counter()
        self.seconds[kind] += ended - began
        if self._is_recording:
            self._recorded.append(Span(kind, began, ended))

    def start_recording(self) -> None:
        """Record every span from now on. Call `drain` regularly, since the recorded spans occupy memory."""
        self._is_recording = True

    def drain(self) -> list[Span]:
        """Return and remove the spans recorded since the last call, in order."""
        recorded, self._recorded = self._recorded, []
        return recorded


class StepPhase(Enum):
    """Phase of a `ShardedModel`: PUBLISHED -> MINIBATCH -> COMPLETE -> PUBLISHED."""

    PUBLISHED = "parameters published"
    MINIBATCH = "inside a minibatch"
    COMPLETE = "gradients complete"


class StepPhases:
    """State machine of the training step. It rejects calls in the wrong phase and times the synchronization points."""

    def __init__(self, spans: SpanRecorder) -> None:
        self.phase = StepPhase.COMPLETE  # the constructor of `ShardedModel` ends with the first `publish()`
        self._spans = spans

    def require(self, expected: StepPhase, call: str) -> None:
        """Raise RuntimeError if the current phase is not `expected`."""
        if self.phase is not expected:
            raise RuntimeError(f"{call}: expected the phase {expected.value!r}, got {self.phase.value!r}")

    def advance(self, expected: StepPhase, following: StepPhase, call: str) -> None:
        """Check the current phase as `require` does, then enter the phase `following`."""
        self.require(expected, call)
        self.phase = following

    def synchronize(self, point: str, collective: Callable[[], T]) -> T:
        """Call a collective, record its time under `point`, and return its result. Collective."""
        began = perf_counter()
        result = collective()
        self._spans.add(point, began)
        return result

"""Where a model is between the ordering points, and where a rank's time goes besides computing.

    fetch         waiting for parameters
    accumulate    pushing gradients, or waiting for pushes
    A, N, B       at the ordering points

Seconds of each kind since the start and, if asked for, when. Spans are those of the thread that computes, so they never
overlap.
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
    """Something that this rank did, in seconds of `time.perf_counter`."""

    kind: str
    began: float
    ended: float


class SpanRecorder:
    """Adds up seconds by kind, and keeps the spans themselves from `keep` on.

    Attributes:
        seconds: By kind, since the start.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(SPAN_KINDS, 0.0)
        self._recorded: list[tuple[str, float, float]] | None = None

    def add(self, kind: str, began: float) -> None:
        """Take a span that ends now: a fraction of a microsecond, as it is called for each fetch and push."""
        ended = perf_counter()
        self.seconds[kind] += ended - began
        if self._recorded is not None:
            self._recorded.append((kind, began, ended))

    def start_recording(self) -> None:
        """Keep every span from now on, until to be taken again and again: memory grows meanwhile."""
        self._recorded = []

    def drain(self) -> list[Span]:
        """Return the spans kept since the last call, in order, and forget them; none if none were kept."""
        if not self._recorded:
            return []
        kept, self._recorded = self._recorded, []
        return [Span(*span) for span in kept]


class StepPhase(Enum):
    """Between which ordering points a model is."""

    PUBLISHED = "after B: a minibatch may begin"
    MINIBATCH = "inside a minibatch"
    COMPLETE = "after A: gradients are complete"


class StepPhases:
    """Refuses calls out of turn, and keeps the times of the ordering points.

    Args:
        spans: Told of every wait at a point.

    Attributes:
        phase: Where the model is.
    """

    def __init__(self, spans: SpanRecorder) -> None:
        self.phase = StepPhase.COMPLETE
        self._spans = spans

    def require(self, expected: StepPhase, call: str) -> None:
        """Refuse a call in another phase than it belongs to.

        Raises:
            RuntimeError: The model is in another phase.
        """
        if self.phase is not expected:
            raise RuntimeError(f"{call} belongs {expected.value!r}, this model is {self.phase.value!r}")

    def advance(self, expected: StepPhase, following: StepPhase, call: str) -> None:
        """Enter the phase that a call leads to, where `require` lets it."""
        self.require(expected, call)
        self.phase = following

    def synchronize(self, point: str, collective: Callable[[], T]) -> T:
        """Return the result of a meeting at A, N or B. Collective."""
        began = perf_counter()
        result = collective()
        self._spans.add(point, began)
        return result

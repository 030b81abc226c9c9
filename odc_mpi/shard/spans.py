"""Where a rank's time goes besides computing: seconds of each kind since the start and, if asked for, when.

    fetch         waiting for parameters
    accumulate    pushing gradients, or waiting for pushes
    A, N, B       at the ordering points

Spans are those of the thread that computes, so they never overlap. Local, all of it.
"""

from time import perf_counter
from typing import NamedTuple

#: All there are.
KINDS = ("fetch", "accumulate", "A", "N", "B")


class Span(NamedTuple):
    """Something that this rank did, in seconds of `time.perf_counter`."""

    kind: str
    began: float
    ended: float


class Spans:
    """Adds up seconds by kind, and keeps the spans themselves from `keep` on.

    Attributes:
        seconds: By kind, since the start.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self._kept: list[tuple[str, float, float]] | None = None

    def add(self, kind: str, began: float) -> None:
        """Take a span that ends now: a fraction of a microsecond, as it is called for each fetch and push. Local."""
        ended = perf_counter()
        self.seconds[kind] += ended - began
        if self._kept is not None:
            self._kept.append((kind, began, ended))

    def keep(self) -> None:
        """Keep every span from now on, until to be taken again and again: memory grows meanwhile. Local."""
        self._kept = []

    def take(self) -> list[Span]:
        """Return the spans kept since the last call, in order, and forget them; none if none were kept. Local."""
        if not self._kept:
            return []
        kept, self._kept = self._kept, []
        return [Span(*span) for span in kept]

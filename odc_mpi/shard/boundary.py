"""Where a model is between the ordering points, and its way past them."""

import time
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from odc_mpi.shard.spans import Spans

T = TypeVar("T")


class Phase(Enum):
    """Between which ordering points a model is."""

    PUBLISHED = "after B: a minibatch may begin"
    MINIBATCH = "inside a minibatch"
    COMPLETE = "after A: gradients are complete"


class Boundary:
    """Refuses calls out of turn, and keeps the times of the ordering points.

    Args:
        spans: Told of every wait at a point.

    Attributes:
        phase: Where the model is.
    """

    def __init__(self, spans: Spans) -> None:
        self.phase = Phase.COMPLETE
        self._spans = spans

    def require(self, expected: Phase, call: str) -> None:
        """Refuse a call in another phase than it belongs to. Local.

        Raises:
            RuntimeError: The model is in another phase.
        """
        if self.phase is not expected:
            raise RuntimeError(f"{call} belongs {expected.value!r}, this model is {self.phase.value!r}")

    def advance(self, expected: Phase, following: Phase, call: str) -> None:
        """Enter the phase that a call leads to, where `require` lets it. Local."""
        self.require(expected, call)
        self.phase = following

    def meet(self, point: str, meet: Callable[[], T]) -> T:
        """Return the result of a meeting at A, N or B. Collective."""
        began = time.perf_counter()
        result = meet()
        self._spans.add(point, began)
        return result

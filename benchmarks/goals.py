"""Bounds on figures of studies, for the entry `goals` of their JSON objects."""

import operator
from dataclasses import dataclass
from typing import Any

_BOUNDS = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True)
class Goal:
    """A bound on the figure `name`: `bound` is ">=" or "<=", and `expected` the value to compare with."""

    name: str
    bound: str
    expected: float

    def evaluate(self, figure: float, **fields: Any) -> dict[str, Any]:
        """Compare a figure with the goal, and return an entry of `goals`, with further `fields`."""
        reached = _BOUNDS[self.bound](figure, self.expected)
        return {"goal": self.name, **fields, "figure": figure, "expected": self.expected, "reached": reached}

"""Rule that decides from changes of gradient norms when islands synchronize. This module does not communicate.

The rule is that of SelSync (arXiv 2307.07950; code: https://github.com/sahiltyagi4/SelSync at f6910a7). With E the mean
of an island's latest gradient norms, the islands synchronize after a step in which E changes by `threshold` or more, as
a fraction of its former value, on any island.

As in that code, E is the mean of the last 25 norms, in which each norm weighs 0.99 times as much as its successor, and
the first steps synchronize. Different from that code, E exists from the first norm on, the change of the latest step
counts instead of the mean of the last 25 changes, and norms that are not finite are ignored.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

#: Number of latest norms that are averaged, and number of first steps that all synchronize.
WINDOW = 25
#: Weights of the norms in a full window, from the oldest to the latest.
_WEIGHTS = [0.99**age for age in reversed(range(WINDOW))]


class ChangeRule:
    """Decides after each step whether the islands synchronize. Ranks that pass the same norms decide the same.

    Args:
        threshold: The islands synchronize if the smoothed gradient norm of any of them changes by at least this
            fraction in a step. With 0, they synchronize after every step.
    """

    def __init__(self, num_islands: int, threshold: float) -> None:
        self._threshold = threshold
        self._num_steps = 0
        self._norms: list[list[float]] = [[] for _ in range(num_islands)]

    def update(self, norms: Sequence[float]) -> bool:
        """Return True if the islands synchronize after this step.

        Args:
            norms: Gradient norm of each island in this step, before clipping. Norms that are not finite are ignored.
        """
        self._num_steps += 1
        changes = [_append(window, norm) for window, norm in zip(self._norms, norms, strict=True)]
        return self._num_steps <= WINDOW or any(change >= self._threshold for change in changes)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the norms in the windows as JSON types."""
        return {"num_steps": self._num_steps, "norms": [list(window) for window in self._norms]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the number of steps and the norms. A state for another number of islands is ignored."""
        if len(state_dict["norms"]) == len(self._norms):
            self._num_steps = state_dict["num_steps"]
            self._norms = [list(window) for window in state_dict["norms"]]


def _append(window: list[float], norm: float) -> float:
    """Append a finite norm to a window. Return the relative change of the mean, or -1 if the norm is not finite."""
    if not math.isfinite(norm):
        return -1.0
    before = _mean(window)
    window.append(norm)
    del window[:-WINDOW]
    after = _mean(window)
    if before == 0:
        return math.inf if after else 0.0
    return abs(after - before) / before


def _mean(window: Sequence[float]) -> float:
    if not window:
        return 0.0
    weights = _WEIGHTS[-len(window) :]
    return sum(weight * norm for weight, norm in zip(weights, window, strict=True)) / sum(weights)

"""Decisions from norms. This module does not communicate.

`UsualNorm` is a moving average of norms. `observe.push_watch` compares the gradients of each rank with it, too.

`NormWatch` finds faults such as a memory error or a library that differs on one host. With two islands it cannot detect
which one is right, only which one left the range of both. It is no protection against a malicious rank.

`ChangeRule` is that of SelSync (arXiv 2307.07950; code: https://github.com/sahiltyagi4/SelSync at f6910a7). With E the
mean of an island's latest gradient norms, the island asks for a synchronization after a step in which E changes by
`threshold` or more, as a fraction of its former value. As in that code, E is the mean of the last 25 norms, in which
each norm weighs 0.99 times as much as its successor, and the first steps synchronize. Unlike in that code, E exists
from the first norm on, the change in the latest step counts instead of the mean of the last 25 changes, and norms that
are not finite are ignored.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from odc_mpi.errors import TrainingError

#: Number of norms before the next one is compared with their mean.
WARM_UP = 10
#: Weight of the latest norm in the exponential mean.
_MEAN_WEIGHT = 0.1
#: Number of consecutive synchronizations without the contribution of an island that ends the run.
_MAX_CONSECUTIVE = 3
#: Number of most recent norms to average, and of initial steps after each of which the islands synchronize.
WINDOW = 25
#: Weights of the norms in a full window, from the oldest to the latest.
_WEIGHTS = [0.99**age for age in reversed(range(WINDOW))]


class UsualNorm:
    """Exponential moving average of norms, initially 0, and the number of its norms."""

    def __init__(self, mean: float = 0.0, count: int = 0) -> None:
        self.mean, self.count = mean, count

    def factor(self, norm: float) -> float:
        """Return `norm` as a multiple of the mean: infinity if it is not finite, and 0 if the mean is 0."""
        return math.inf if not math.isfinite(norm) else norm / self.mean if self.mean > 0 else 0.0

    def is_exceeded(self, factor: float, limit: float) -> bool:
        """Return True if `factor` is infinite or, after 10 norms, above `limit`. A `limit` of 0 allows any number."""
        return not math.isfinite(factor) or (0 < limit < factor and self.count >= WARM_UP)

    def add(self, norm: float) -> None:
        """Let a finite norm enter the mean."""
        self.mean += (_MEAN_WEIGHT if self.count else 1.0) * (norm - self.mean)
        self.count += 1


class NormWatch:
    """Decides which islands' contributions a synchronization leaves out.

    Keeps an exponential moving average of the accepted norms of all islands for each fragment. Contributions with a
    norm that is not finite or, after 10 synchronizations of the fragment, above the limit are left out. If this applies
    to all islands, those with finite norms are accepted. Ranks that pass the same norms make the same decisions.

    Args:
        limit: Largest accepted norm, as a multiple of the mean. 0 accepts all finite norms.
    """

    def __init__(self, num_islands: int, num_fragments: int, limit: float) -> None:
        self._limit = limit
        self._usual = [UsualNorm() for _ in range(num_fragments)]
        self._num_consecutive = [0] * num_islands

    def check(self, fragment: int, norms: Mapping[int, float]) -> dict[int, float]:
        """Return the islands to leave out, mapped to their norms as multiples of the mean (infinity if not finite).

        Args:
            fragment: Index of the fragment that is synchronized.
            norms: For each island that takes part, the norm of the fragment's outer minus local parameters, per step.

        Raises:
            TrainingError: An island's contribution is left out for the third time in a row, regardless of the fragment.
        """
        usual = self._usual[fragment]
        factors = {island: usual.factor(norm) for island, norm in norms.items()}
        left_out = {island: factor for island, factor in factors.items() if usual.is_exceeded(factor, self._limit)}
        if len(left_out) == len(norms):  # a change of training, not a fault of one island
            left_out = {island: factor for island, factor in left_out.items() if math.isinf(factor)}
        if accepted := [norm for island, norm in norms.items() if island not in left_out]:
            usual.add(sum(accepted) / len(accepted))
        for island in norms:
            self._num_consecutive[island] = self._num_consecutive[island] + 1 if island in left_out else 0
        for island, factor in left_out.items():
            if self._num_consecutive[island] >= _MAX_CONSECUTIVE:
                raise TrainingError(self._message(island, factor))
        return left_out

    def describe(self, factor: float) -> str:
        """Return a description, for use in messages, of a norm that is `factor` times the mean."""
        usual = f"times the usual norm (islands.norm_limit {self._limit:g})"
        return f"{factor:.3g} {usual}" if math.isfinite(factor) else "not finite"

    def state_dict(self) -> dict[str, Any]:
        """Return the means and counts as JSON-serializable values."""
        return {
            "means": [usual.mean for usual in self._usual],
            "num_rounds": [usual.count for usual in self._usual],
            "num_consecutive": list(self._num_consecutive),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the means and counts. A state for a different number of islands or fragments is ignored."""
        means, num_consecutive = state_dict["means"], state_dict["num_consecutive"]
        if len(means) == len(self._usual) and len(num_consecutive) == len(self._num_consecutive):
            self._usual = [UsualNorm(*each) for each in zip(means, state_dict["num_rounds"], strict=True)]
            self._num_consecutive = list(num_consecutive)

    def _message(self, island: int, factor: float) -> str:
        remedy = ". If they are healthy, raise islands.norm_limit" if math.isfinite(factor) else ""
        return (
            f"island {island} was left out of {_MAX_CONSECUTIVE} synchronizations in a row: the norm of its change of "
            f"the parameters is {self.describe(factor)}: check its hosts, then resume from the last checkpoint{remedy}"
        )


class ChangeRule:
    """Decides after each step whether an island asks for a synchronization.

    Args:
        threshold: The island asks if its smoothed gradient norm changes by at least this fraction in a step.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._num_steps = 0
        self._norms: list[float] = []

    def update(self, norm: float) -> bool:
        """Return True if the island asks for a synchronization after this step.

        `norm` is the gradient norm of this step, before clipping. A norm that is not finite is ignored.
        """
        self._num_steps += 1
        before = _mean(self._norms)
        if math.isfinite(norm):
            self._norms = [*self._norms, norm][-WINDOW:]
        change = abs(_mean(self._norms) - before)
        return self._num_steps <= WINDOW or (change > 0 and change >= self._threshold * before)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the latest norms as JSON-serializable values."""
        return {"num_steps": self._num_steps, "norms": self._norms}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the number of steps and the latest norms."""
        self._num_steps, self._norms = state_dict["num_steps"], list(state_dict["norms"])


def _mean(norms: Sequence[float]) -> float:
    weights = _WEIGHTS[-len(norms) :]
    return sum(weight * norm for weight, norm in zip(weights, norms, strict=True)) / sum(weights) if norms else 0.0

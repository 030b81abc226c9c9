"""Detection of islands whose contributions have unusual norms. This module does not communicate.

It finds faults such as a memory error or a library that differs on one host. With two islands it cannot tell which
one is right, only which one left the range of both. It is no protection against a malicious rank.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from odc_mpi.errors import TrainingError

#: Synchronizations of a fragment before norms are compared with their mean.
WARM_UP = 10
#: Weight of the latest norms in the exponential mean.
_MEAN_WEIGHT = 0.1
#: Number of consecutive synchronizations without the contribution of an island that ends the run.
_MAX_CONSECUTIVE = 3


class NormWatch:
    """Decides which islands' contributions a synchronization leaves out.

    For each fragment, there is an exponential moving average of the accepted norms of all islands. Contributions with a
    norm that is not finite or, after 10 synchronizations of the fragment, above the limit are left out. If this applies
    to all islands, finite norms are accepted. Ranks that pass the same norms decide the same.

    Args:
        limit: Largest norm that is accepted, as a multiple of the mean. 0 accepts all finite norms.
    """

    def __init__(self, num_islands: int, num_fragments: int, limit: float) -> None:
        self._limit = limit
        self._means = [0.0] * num_fragments
        self._num_rounds = [0] * num_fragments
        self._num_consecutive = [0] * num_islands

    def check(self, fragment: int, norms: Sequence[float]) -> dict[int, float]:
        """Return the islands to leave out, each with its norm as a multiple of the mean (infinity if not finite).

        Args:
            fragment: Index of the fragment that is synchronized.
            norms: For each island, the norm of the fragment's outer minus local parameters, per step of training.

        Raises:
            TrainingError: An island's contribution is left out for the third time in a row, in whatever fragments.
        """
        factors = [self._factor(fragment, norm) for norm in norms]
        left_out = {island: factor for island, factor in enumerate(factors) if not self._is_accepted(fragment, factor)}
        if len(left_out) == len(norms):  # a change of training, not a fault of one island
            left_out = {island: factor for island, factor in left_out.items() if math.isinf(factor)}
        self._update_mean(fragment, [norm for island, norm in enumerate(norms) if island not in left_out])
        for island in range(len(norms)):
            self._num_consecutive[island] = self._num_consecutive[island] + 1 if island in left_out else 0
        for island, factor in left_out.items():
            if self._num_consecutive[island] >= _MAX_CONSECUTIVE:
                raise TrainingError(self._message(island, factor))
        return left_out

    def describe(self, factor: float) -> str:
        """Describe a norm that is `factor` times the mean, for a message."""
        usual = f"times the usual norm (islands.norm_limit {self._limit:g})"
        return f"{factor:.3g} {usual}" if math.isfinite(factor) else "not finite"

    def state_dict(self) -> dict[str, Any]:
        """Return the means and counts as JSON types."""
        return {
            "means": list(self._means),
            "num_rounds": list(self._num_rounds),
            "num_consecutive": list(self._num_consecutive),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the means and counts. A state for another number of islands or fragments is ignored."""
        means, num_consecutive = state_dict["means"], state_dict["num_consecutive"]
        if len(means) == len(self._means) and len(num_consecutive) == len(self._num_consecutive):
            self._means = list(means)
            self._num_rounds = list(state_dict["num_rounds"])
            self._num_consecutive = list(num_consecutive)

    def _factor(self, fragment: int, norm: float) -> float:
        mean = self._means[fragment]
        return math.inf if not math.isfinite(norm) else norm / mean if mean > 0 else 0.0

    def _is_accepted(self, fragment: int, factor: float) -> bool:
        is_compared = self._limit > 0 and self._num_rounds[fragment] >= WARM_UP
        return math.isfinite(factor) and not (is_compared and factor > self._limit)

    def _update_mean(self, fragment: int, accepted: Sequence[float]) -> None:
        if accepted:
            latest = sum(accepted) / len(accepted)
            weight = _MEAN_WEIGHT if self._num_rounds[fragment] else 1.0
            self._means[fragment] += weight * (latest - self._means[fragment])
            self._num_rounds[fragment] += 1

    def _message(self, island: int, factor: float) -> str:
        remedy = ". If they are healthy, raise islands.norm_limit" if math.isfinite(factor) else ""
        return (
            f"island {island} was left out of {_MAX_CONSECUTIVE} synchronizations in a row: the norm of its change of "
            f"the parameters is {self.describe(factor)}: check its hosts, then resume from the last checkpoint{remedy}"
        )

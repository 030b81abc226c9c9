"""Contribution of an island to the next merge of each fragment. This module does not communicate."""

from collections.abc import Mapping
from typing import Any

import numpy as np


class Contributions:
    """Amounts, steps and missed merges of an island, for each fragment, since its difference last entered a merge.

    Attributes:
        amounts: Loss tokens or pairs, float64 `[fragments]`.
        ages: Steps, int64 `[fragments]`.
        lags: Merges of the fragment without this island's difference, int64 `[fragments]`.
    """

    def __init__(self, num_fragments: int) -> None:
        self.amounts = np.zeros(num_fragments)
        self.ages, self.lags = np.zeros((2, num_fragments), dtype=np.int64)

    def add_step(self, amount: float) -> None:
        """Add a step on `amount` loss tokens or pairs."""
        self.amounts += amount
        self.ages += 1

    def take(self, fragment: int) -> tuple[float, int, int]:
        """Return the amount, the steps and the missed merges of a fragment that is sent, and start again from zero."""
        taken = float(self.amounts[fragment]), int(self.ages[fragment]), int(self.lags[fragment])
        self.amounts[fragment] = self.ages[fragment] = self.lags[fragment] = 0
        return taken

    def give_back(self, fragment: int, taken: tuple[float, int, int]) -> None:
        """Add what was taken for a difference that did not enter the merge."""
        self.amounts[fragment] += taken[0]
        self.ages[fragment] += taken[1]
        self.lags[fragment] += taken[2]

    def miss(self, first: int, last: int) -> None:
        """Count merges `first + 1` to `last`, numbered over all fragments, which did not contain this island."""
        for merge in range(first, last):
            self.lags[merge % len(self.lags)] += 1

    def state_dict(self) -> dict[str, Any]:
        """Return all numbers as JSON-serializable values."""
        return {name: getattr(self, name).tolist() for name in ("amounts", "ages", "lags")}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the numbers of the same number of fragments."""
        for name in ("amounts", "ages", "lags"):
            getattr(self, name)[:] = state_dict.get(name, 0)

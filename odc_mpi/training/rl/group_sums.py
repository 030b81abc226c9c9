"""Sums over the prompt groups of a minibatch that do not depend on which rank generated or trained which group.

A floating-point sum depends on the order of its terms. Therefore the value of each group is gathered separately (all
ranks but one have 0), and all ranks add the values in the order of the prompts.
"""

import math
from collections.abc import Sequence

from odc_mpi.shard import model as sharded


class GroupSums:
    """Named sums of a step, gathered separately for each of at most `num_groups` prompt groups of a minibatch."""

    def __init__(self, sums: Sequence[str], num_groups: int) -> None:
        self._num_groups = num_groups
        self.gathered_names = tuple(_name(each, position) for each in sums for position in range(num_groups))
        self.reset()

    def reset(self) -> None:
        """Set all values to 0."""
        self._values = dict.fromkeys(self.gathered_names, 0.0)

    def add(self, name: str, position: int, value: float) -> None:
        """Add to the value of a group in the sum `name`. `position` is the index of the group in the minibatch."""
        self._values[_name(name, position)] += value

    def local_values(self) -> list[float]:
        """Return the values of this rank in the order of `gathered_names`."""
        return list(self._values.values())

    def value_of(self, gathered: sharded.MinibatchStats, name: str, position: int) -> float:
        """Return the value of a group, given by its index in the minibatch, from those gathered from all ranks."""
        return gathered.sum(_name(name, position))

    def total(self, gathered: sharded.MinibatchStats, name: str) -> float:
        """Return the sum `name` over all groups and ranks. It is computed exactly and rounded once."""
        return math.fsum(self.value_of(gathered, name, position) for position in range(self._num_groups))


def _name(name: str, position: int) -> str:
    return f"{name}_{position}"

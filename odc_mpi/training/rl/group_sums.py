"""Sums over the prompt groups of a minibatch that do not depend on which rank had which group.

A sum of floating-point numbers depends on its order. So the part of each group is told by itself at point A, where one
rank alone has it, and all ranks add the parts up in the order of the prompts.
"""

import math
from collections.abc import Sequence

from odc_mpi.shard import model as sharded


class GroupSums:
    """Sums of a step, by prompt group.

    Args:
        sums: Names of the sums.
        num_groups: The most prompt groups of a minibatch.

    Attributes:
        gathered_names: Of the numbers that a rank tells: of each sum the parts of all groups.
    """

    def __init__(self, sums: Sequence[str], num_groups: int) -> None:
        self._num_groups = num_groups
        self.gathered_names = tuple(_name(each, position) for each in sums for position in range(num_groups))
        self.reset()

    def reset(self) -> None:
        """Start at zero."""
        self._values = dict.fromkeys(self.gathered_names, 0.0)

    def add(self, name: str, position: int, value: float) -> None:
        """Add a number to the part of the group at a position of the minibatch."""
        self._values[_name(name, position)] += value

    def local_values(self) -> list[float]:
        """Return the parts of this rank, in the order of the names."""
        return list(self._values.values())

    def part(self, gathered: sharded.MinibatchStats, name: str, position: int) -> float:
        """Return the part of the group at a position. Local, after point A."""
        return gathered.sum(_name(name, position))

    def total(self, gathered: sharded.MinibatchStats, name: str) -> float:
        """Return a sum over all groups, rounded once. Local, after point A."""
        return math.fsum(self.part(gathered, name, position) for position in range(self._num_groups))


def _name(name: str, position: int) -> str:
    return f"{name}_{position}"

"""What the ranks tell each other at point A: numbers, whether sums are finite, which parameters got a gradient.

    report    [ sums | values | parameters ]   float64, one row of each rank

The parameters are a bitmap in the order of the layouts, 32 to a number, each of which a float64 holds exactly: 10,000
parameters take 2.5 KB beside the few numbers. The sums are those that tell whether gradients are finite
(`shard.gradient_format`). A parameter that no rank pushed a gradient of has none, as in plain
torch: an optimizer leaves it alone, instead of decaying it and moving it by its momentum. No communication.
"""

from collections.abc import Iterable, Sequence

import numpy as np

#: What every model tells of each rank: bytes since the A before, of `comm.traffic`.
TRAFFIC = tuple(f"bytes_{did}_{where}" for did in ("fetched", "pushed") for where in ("same_node", "other_nodes"))


class MinibatchStats:
    """What the ranks tell each other when a minibatch ends.

    Args:
        names: Of the numbers.

    Attributes:
        local: This rank's numbers by name; add to them while the minibatch runs.
        finite: After the minibatch: whether the sums of all ranks' gradients are finite.
        sums: After the minibatch: the sums over all ranks of what they reported as such, float64 `[k]`.
        pushed: After the minibatch: of each parameter, whether any rank pushed a gradient of it.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.local = dict.fromkeys(names, 0.0)
        self.finite = True
        self.sums = np.empty(0)
        self.pushed: list[bool] = []
        self._reports = np.empty((0, 0))
        self._columns: dict[str, int] = {}

    def report(self, sums: np.ndarray, pushed: Sequence[bool]) -> np.ndarray:
        """Return the numbers that this rank tells at A, float64.

        Args:
            sums: Numbers of which all ranks get the sum, float64 `[k]`, as many on each.
            pushed: Of each trainable parameter, whether this rank pushed a gradient of it.
        """
        self.pushed = list(pushed)
        self.sums = sums
        bits = np.zeros(-(-len(pushed) // 32) * 32, dtype=np.bool_)
        bits[: len(pushed)] = pushed
        return np.array([*sums, *self.local.values(), *np.packbits(bits).view(np.uint32)])

    def receive_reports(self, reports: np.ndarray) -> None:
        """Take what all ranks told, a row from each."""
        count = len(self.sums)
        self._columns = {name: column for column, name in enumerate(self.local)}
        sums, self._reports, words = np.split(reports, [count, count + len(self.local)], axis=1)
        self.sums = sums.sum(axis=0)
        merged = np.bitwise_or.reduce(words.astype(np.uint32), axis=0)
        self.pushed = np.unpackbits(merged.view(np.uint8), count=len(self.pushed)).astype(np.bool_).tolist()

    def per_rank(self, name: str) -> np.ndarray:
        """Return every rank's number of this name, `[size]` float64. Local, after the minibatch."""
        return self._reports[:, self._columns[name]]

    def sum(self, name: str) -> float:
        """Return the sum over all ranks, the same to the last bit on each. Local, after the minibatch."""
        return float(self.per_rank(name).sum())

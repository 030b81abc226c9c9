"""Numbers that the ranks exchange when the gradients are complete. Does not communicate.

    report    [ sums | values | parameters ]   float64, one row per rank

The sums show whether the gradients are finite (`shard.gradient_format`). The parameters are a bitmap of those with a
gradient, in the order of the layouts. A float64 holds 32 bits exactly, so 10,000 parameters add 2.5 KB. If no rank
pushed a gradient of a parameter, it has none, as in plain PyTorch: the optimizer skips it instead of applying weight
decay and momentum.
"""

from collections.abc import Iterable, Sequence

import numpy as np

#: Values of every model: bytes of `comm.traffic` since the previous minibatch was complete.
TRAFFIC = tuple(f"bytes_{did}_{where}" for did in ("fetched", "pushed") for where in ("same_node", "other_nodes"))


class MinibatchStats:
    """Statistics of a minibatch. All attributes but `local` are valid after the minibatch.

    Attributes:
        local: Values of this rank by name, with equal names on all ranks. Add to them during the minibatch.
        finite: True if the gradients, summed over all ranks, are finite.
        sums: Sums over the ranks of the numbers reported as `sums`, float64 `[k]`.
        pushed: For each parameter, True if any rank pushed a gradient of it.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.local = dict.fromkeys(names, 0.0)
        self.finite = True
        self.sums = np.empty(0)
        self.pushed: list[bool] = []
        self._reports = np.empty((0, 0))
        self._columns: dict[str, int] = {}

    def report(self, sums: np.ndarray, pushed: Sequence[bool]) -> np.ndarray:
        """Return the report of this rank, float64. Arguments as the attributes, but for this rank alone."""
        self.pushed = list(pushed)
        self.sums = sums
        bits = np.zeros(-(-len(pushed) // 32) * 32, dtype=np.bool_)
        bits[: len(pushed)] = pushed
        return np.array([*sums, *self.local.values(), *np.packbits(bits).view(np.uint32)])

    def receive_reports(self, reports: np.ndarray) -> None:
        """Evaluate the reports of all ranks, one row per rank."""
        count = len(self.sums)
        self._columns = {name: column for column, name in enumerate(self.local)}
        sums, self._reports, words = np.split(reports, [count, count + len(self.local)], axis=1)
        self.sums = sums.sum(axis=0)
        merged = np.bitwise_or.reduce(words.astype(np.uint32), axis=0)
        self.pushed = np.unpackbits(merged.view(np.uint8), count=len(self.pushed)).astype(np.bool_).tolist()

    def per_rank(self, name: str) -> np.ndarray:
        """Return the value of each rank, `[size]` float64."""
        return self._reports[:, self._columns[name]]

    def sum(self, name: str) -> float:
        """Return the sum of a value over all ranks, bitwise identical on all ranks. Does not communicate."""
        return float(self.per_rank(name).sum())

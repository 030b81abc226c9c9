"""Statistics that the ranks exchange when the gradients are complete. This module does not communicate.

    report    [ sums | values | parameters ]   float64, one row per rank

The sums over all ranks show whether the gradients are finite (`shard.gradient_format`). `parameters` is a bitmap of the
parameters with a gradient, in layout order. If no rank has pushed a gradient for a parameter, its `.grad` is None, as
in plain PyTorch. The optimizer then skips the parameter instead of applying weight decay and momentum. Each float64
holds 32 bits, so with 18,000 parameters and 1,024 ranks, each rank receives 4.6 MB of bitmaps.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from odc_mpi.comm.traffic import LOCATIONS

#: Names of the values that every model reports: bytes moved since the previous minibatch (`Transport.take_traffic`).
TRAFFIC = tuple(f"bytes_{did}_{location}" for did in ("fetched", "pushed") for location in LOCATIONS)


class MinibatchStats:
    """Statistics of a minibatch, which the ranks exchange at its end. Until then, only `local` is valid.

    Args:
        names: Names of the values in `local`. Must be the same on all ranks.

    Attributes:
        local: This rank's values by name, initially 0. Add to them during the minibatch.
        finite: True if the gradients, summed over all ranks, are finite.
        sums: The `sums` argument of `report`, summed over all ranks, float64 `[k]`.
        pushed: For each trainable parameter, True if any rank pushed a gradient for it.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.local = dict.fromkeys(names, 0.0)
        self.finite = True
        self.sums = np.empty(0)
        self.pushed: list[bool] = []
        self._of_ranks: dict[str, np.ndarray] = {}

    def report(self, sums: np.ndarray, pushed: Sequence[bool]) -> np.ndarray:
        """Return this rank's statistics as a row of float64 numbers for the ranks to exchange.

        Args:
            sums: Additional numbers that will be summed over all ranks, float64 `[k]`.
            pushed: For each trainable parameter, True if this rank pushed a gradient for it.
        """
        self.pushed = list(pushed)
        self.sums = sums
        bits = np.zeros(-(-len(pushed) // 32) * 32, dtype=np.bool_)
        bits[: len(pushed)] = pushed
        return np.array([*sums, *self.local.values(), *np.packbits(bits).view(np.uint32)])

    def receive_reports(self, reports: np.ndarray) -> None:
        """Set `sums`, `pushed` and the values of each rank from all ranks' reports, one row per rank."""
        count = len(self.sums)
        sums, values, words = np.split(reports, [count, count + len(self.local)], axis=1)
        self._of_ranks = dict(zip(self.local, values.T, strict=True))
        self.sums = sums.sum(axis=0)
        merged = np.bitwise_or.reduce(words.astype(np.uint32), axis=0)
        self.pushed = np.unpackbits(merged.view(np.uint8), count=len(self.pushed)).astype(np.bool_).tolist()

    def per_rank(self, name: str) -> np.ndarray:
        """Return the value `name` of each rank, float64 `[ranks]`."""
        return self._of_ranks[name]

    def sum(self, name: str) -> float:
        """Return the sum of the value `name` over all ranks, which is bitwise identical on every rank."""
        return float(self.per_rank(name).sum())

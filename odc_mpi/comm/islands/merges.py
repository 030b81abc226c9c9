"""Exchange of fragments between islands that train apart.

The difference of an island carries numbers (`Header`), by which all islands agree without further messages: on the
weights, on whether more merges follow at once, on saving, and on the end of training.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.islands.messages import MessageWindow
from odc_mpi.comm.islands.quorum_window import QuorumWindow
from odc_mpi.errors import TrainingError, warn
from odc_mpi.islands.norms import NormWatch
from odc_mpi.islands.outer_optimizer import OuterOptimizer, normalized
from odc_mpi.islands.quorum import Quorum


class MergeError(TrainingError):
    """Raised on all ranks of all islands."""


class Header(NamedTuple):
    """Numbers that an island sends with a difference.

    Attributes:
        amount: Number of loss tokens or pairs on which the island has trained since its difference last entered a merge
            of the fragment.
        age: Number of steps that the island has taken since then.
        lag: Number of merges of the fragment since then.
        until: Number of the merge up to which merges follow at once, without further steps. A number that is not above
            that of this merge has no effect.
        clock: Largest number of steps of an island that earlier merges, or this one, contain, as far as known.
        saves: 1 if a checkpoint of the island is due, otherwise 0.
        stops, has_finished: 1 if the island was asked to stop, and if it has taken its last step, otherwise 0.
        checksum: Checksum of the rank's outer parameters and momentum of the fragment before the merge.
    """

    amount: float
    age: float
    lag: float
    until: float
    clock: float
    saves: float
    stops: float
    has_finished: float
    checksum: float = 0.0

    @property
    def weight(self) -> float:
        """Weight of the difference, not normalized. It falls with the lag, as in TEASQ-Fed (arXiv 2312.15186)."""
        return self.amount * (1 + self.lag) ** -0.5


_HEADER_BYTES = 8 * len(Header._fields)


class MergeResult(NamedTuple):
    """Result of the merges after one step, which is the same on all ranks of an island.

    Attributes:
        outer_norm: Norm of the mean difference between outer and local parameters.
        outer_cosine: Weighted mean cosine over all pairs of islands whose differences were used, or 0 if there is none.
        contributions_left_out: Number of differences that were left out because of their norms.
        late_islands: Number of islands that were late for the merge.
        lag: Number of merges without this island's difference before the one that contains it.
        bytes_between_islands: Bytes received from other islands in these merges, averaged over the ranks of the island.
        island_wait_s: Time in seconds spent waiting for other islands, averaged over the ranks of the island.
    """

    outer_norm: float
    outer_cosine: float
    contributions_left_out: int
    late_islands: int
    lag: int
    bytes_between_islands: float
    island_wait_s: float


class Received(NamedTuple):
    """Fragment for which the differences of all islands, or of a quorum, have arrived.

    Attributes:
        islands: Islands whose differences have arrived, in ascending order.
        headers: Header of each of them.
        mean: Mean difference, fp32 `[n]`, which is 0 if no island has contributed.
        is_used: True if an island has contributed.
        left_out: Islands whose differences were left out.
    """

    islands: list[int]
    headers: list[Header]
    mean: torch.Tensor
    is_used: bool
    left_out: list[int]
    result: MergeResult


class FragmentExchange:
    """Exchanges one fragment at a time between islands. Construction is collective.

    Args:
        quorum: Rule for merges without all islands, or None.
        progress: With a quorum, returns JSON-serializable values that an island needs to continue from this one.

    Attributes:
        window: Window through which the islands exchange differences and requests.
        watch: `NormWatch` that decides which islands' differences are left out.
    """

    def __init__(
        self,
        islands: Islands,
        optimizer: OuterOptimizer,
        norm_limit: float,
        quorum: Quorum | None = None,
        progress: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._islands, self._optimizer, self._progress = islands, optimizer, progress
        self.watch = NormWatch(islands.size, len(optimizer.message_bytes), norm_limit)
        max_bytes = _HEADER_BYTES + max(optimizer.message_bytes)
        self.window = (
            QuorumWindow(islands, max_bytes, quorum, _needs_all, self._send_state)
            if quorum
            else MessageWindow(islands, max_bytes)
        )

    def send(self, fragment: int, header: Header) -> None:
        """Show this island's difference for a fragment to the other islands. One-sided, does not wait."""
        header = header._replace(checksum=self._optimizer.checksum(fragment))
        message = self._optimizer.encode(fragment).cpu().numpy()
        self.window.show(np.concatenate([np.array(header).view(np.uint8), message]))

    def receive(self, fragment: int) -> Received | dict[str, Any]:
        """Wait for the differences in flight, and return their mean. Collective over the island.

        If `watch` rejects the differences of some islands, all islands leave them out. With a quorum, the other islands
        may have merged without this one. The outer parameters then become those of another island, and the values of
        its `progress` are returned.

        Raises:
            MergeError: The outer parameters of two islands differ, or an island was left out three times in a row.
        """
        began = time.perf_counter()
        received, islands = self.window.receive()
        if self._islands.index not in islands:
            return self._catch_up()
        waited_s = time.perf_counter() - began
        received, count, num_ranks = received[islands], len(islands), self._islands.island.size
        headers = _headers(received)
        num_bytes = self._optimizer.message_bytes[fragment]
        messages = torch.from_numpy(received)[:, _HEADER_BYTES : _HEADER_BYTES + num_bytes]
        weights = normalized([header.weight for header in headers])
        mean, squares = self._optimizer.combine(fragment, messages, weights)
        differs = [float(header.checksum != headers[0].checksum) for header in headers]
        totals = self._sum([*squares, *differs, waited_s, num_bytes])
        *totals, all_waited_s, all_bytes = totals
        _require_equal(islands, totals[-count:])
        norms = np.sqrt(totals[:-count]).tolist()
        per_step = {
            island: norm / max(1.0, header.age)
            for island, norm, header in zip(islands, norms[:-1], headers, strict=True)
        }
        try:
            left_out = self.watch.check(fragment, per_step)
        except TrainingError as error:
            raise MergeError(str(error)) from error
        if left_out:
            weights = normalized([0.0 if island in left_out else w for island, w in zip(islands, weights, strict=True)])
            mean, squares = self._optimizer.combine(fragment, messages, weights)
            norms = np.sqrt(self._sum(squares)).tolist()
            if self._islands.index == islands[0] and self._islands.island.rank == 0:
                for island, factor in left_out.items():
                    warn(
                        f"WARNING: the change of the parameters on island {island} was left out: its norm is "
                        f"{self.watch.describe(factor)}. If this happens again, check the hosts of the island"
                    )
        result = MergeResult(
            outer_norm=norms[-1],
            outer_cosine=_mean_cosine(norms[:-1], norms[-1], weights),
            contributions_left_out=len(left_out),
            late_islands=self._islands.size - count,
            lag=int(headers[islands.index(self._islands.index)].lag),
            # The ranks of an island share a fragment unevenly.
            bytes_between_islands=all_bytes * (count - 1) / num_ranks,
            island_wait_s=all_waited_s / num_ranks,
        )
        return Received(islands, headers, mean, any(weights), list(left_out), result)

    def close(self) -> None:
        """Free the window. Collective over all islands. Idempotent."""
        self.window.close()

    def _send_state(self, rank: int) -> None:
        assert isinstance(self.window, QuorumWindow)
        window, optimizer = self.window, self._optimizer
        state = {**self._progress(), "watch": self.watch.state_dict()}
        state |= {"decided": window.decided, "active": window.active}
        window.reports.send_state(rank, state, [*optimizer.outer, *optimizer.velocities])

    def _catch_up(self) -> dict[str, Any]:
        assert isinstance(self.window, QuorumWindow)
        optimizer = self._optimizer
        state, tensors = self.window.catch_up([*optimizer.outer, *optimizer.velocities])
        optimizer.catch_up(tensors[: len(optimizer.outer)], tensors[len(optimizer.outer) :])
        self.watch.load_state_dict(state["watch"])
        return state

    def _sum(self, values: Sequence[float]) -> list[float]:
        """Sum `values` over the ranks of the island. Collective over the island."""
        return self.window.gather(np.array(values, dtype=np.float64)).sum(axis=0).tolist()


def merge_results(results: Sequence[MergeResult | None]) -> MergeResult | None:
    """Combine the results of all merges after a step. Return None if there were none."""
    present = [each for each in results if each]
    if len(present) < 2:
        return present[0] if present else None
    norms, cosines, left_out, late, lags, num_bytes, waits = zip(*present, strict=True)
    counts = sum(left_out), sum(late), sum(lags)
    return MergeResult(math.hypot(*norms), sum(cosines) / len(cosines), *counts, sum(num_bytes), sum(waits))


def _headers(messages: np.ndarray) -> list[Header]:
    """Return the headers of messages, uint8 `[islands, n]`."""
    return [Header(*row) for row in messages[:, :_HEADER_BYTES].copy().view(np.float64).tolist()]


def _needs_all(messages: np.ndarray) -> bool:
    """Return True if a merge of these messages must contain all islands: one stops, or all have finished."""
    headers = _headers(messages)
    return any(header.stops for header in headers) or all(header.has_finished for header in headers)


def _require_equal(islands: Sequence[int], differing: Sequence[float]) -> None:
    """Raise `MergeError` if the outer parameters of an island, on any of its ranks, differ from those of the first."""
    for island, count in zip(islands, differing, strict=True):
        if count:
            raise MergeError(
                f"the outer parameters of islands {islands[0]} and {island} differ, probably because of a memory "
                "error on one of them: check the hosts of both, and resume from the last checkpoint"
            )


def _mean_cosine(norms: Sequence[float], mean_norm: float, weights: Sequence[float]) -> float:
    """Return the mean cosine over all pairs of islands' differences, weighted by the weights and norms of both.

    It follows from the norms alone, because the square of the mean contains the inner products of all pairs.
    """
    squares = sum((weight * norm) ** 2 for weight, norm in zip(weights, norms, strict=True) if weight)
    all_pairs = sum(weight * norm for weight, norm in zip(weights, norms, strict=True) if weight) ** 2
    return (mean_norm**2 - squares) / (all_pairs - squares) if all_pairs > squares else 0.0

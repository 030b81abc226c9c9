"""Exchange of fragments between islands that train apart.

The difference of an island carries numbers (`Header`), by which all islands agree without further messages: on the
weights, on whether more merges follow at once, and on the end of training.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.islands.messages import MessageWindow
from odc_mpi.errors import TrainingError, warn
from odc_mpi.islands.norms import NormWatch
from odc_mpi.islands.outer_optimizer import OuterOptimizer, normalized


class MergeError(TrainingError):
    """Raised on all ranks of all islands."""


class Header(NamedTuple):
    """Numbers that an island sends with a difference.

    Attributes:
        amount: Number of loss tokens or pairs on which the island has trained since it last sent the fragment.
        age: Number of steps that the island has taken since then.
        until: Number of the merge up to which merges follow at once, without further steps. A number that is not above
            that of this merge has no effect.
        stops, has_finished: 1 if the island was asked to stop, and if it has taken its last step, otherwise 0.
        checksum: Checksum of the rank's outer parameters and momentum of the fragment before the merge.
    """

    amount: float
    age: float
    until: float
    stops: float
    has_finished: float
    checksum: float = 0.0


_HEADER_BYTES = 8 * len(Header._fields)


class MergeResult(NamedTuple):
    """Result of the merges after one step, which is the same on all ranks of an island.

    Attributes:
        outer_norm: Norm of the mean difference between outer and local parameters.
        outer_cosine: Weighted mean cosine over all pairs of islands whose differences were used, or 0 if there is none.
        contributions_left_out: Number of differences that were left out because of their norms.
        bytes_between_islands: Bytes received from other islands in these merges, averaged over the ranks of the island.
        island_wait_s: Time in seconds spent waiting for other islands, averaged over the ranks of the island.
    """

    outer_norm: float
    outer_cosine: float
    contributions_left_out: int
    bytes_between_islands: float
    island_wait_s: float


class Received(NamedTuple):
    """Fragment for which the differences of all islands have arrived.

    Attributes:
        headers: Header of each island.
        mean: Mean difference, fp32 `[n]`, which is 0 if no island has contributed.
        is_used: True if an island has contributed.
        left_out: Islands whose differences were left out.
    """

    headers: list[Header]
    mean: torch.Tensor
    is_used: bool
    left_out: list[int]
    result: MergeResult


class FragmentExchange:
    """Exchanges one fragment at a time between islands. Construction is collective.

    Attributes:
        window: Window through which the islands exchange differences and requests.
        watch: `NormWatch` that decides which islands' differences are left out.
    """

    def __init__(self, islands: Islands, optimizer: OuterOptimizer, norm_limit: float) -> None:
        self._islands, self._optimizer = islands, optimizer
        self.watch = NormWatch(islands.size, len(optimizer.message_bytes), norm_limit)
        self.window = MessageWindow(islands.column, _HEADER_BYTES + max(optimizer.message_bytes))
        island = islands.island
        with island.collective("duplicating the communicator"):
            self._comm = island.comm.Dup()
        island.on_close(self._comm.Free)

    def send(self, fragment: int, header: Header) -> None:
        """Show this island's difference for a fragment to the other islands. One-sided, does not wait."""
        header = header._replace(checksum=self._optimizer.checksum(fragment))
        message = self._optimizer.encode(fragment).cpu().numpy()
        self.window.show(np.concatenate([np.array(header).view(np.uint8), message]))

    def receive(self, fragment: int) -> Received:
        """Wait for the differences in flight, and return their mean. Collective over the island.

        If `watch` rejects the differences of some islands, all islands leave them out.

        Raises:
            MergeError: The outer parameters of two islands differ, or an island was left out three times in a row.
        """
        began = time.perf_counter()
        received = self.window.receive()
        waited_s = time.perf_counter() - began
        num_islands, num_ranks = self._islands.size, self._islands.island.size
        headers = [Header(*row) for row in received[:, :_HEADER_BYTES].copy().view(np.float64).tolist()]
        num_bytes = self._optimizer.message_bytes[fragment]
        messages = torch.from_numpy(received)[:, _HEADER_BYTES : _HEADER_BYTES + num_bytes]
        weights = normalized([header.amount for header in headers], {})
        mean, squares = self._optimizer.combine(fragment, messages, weights)
        differs = [float(header.checksum != headers[0].checksum) for header in headers]
        totals = self._sum([*squares, *differs, waited_s, num_bytes])
        *totals, all_waited_s, all_bytes = totals
        _require_equal(totals[-num_islands:])
        norms = np.sqrt(totals[:-num_islands]).tolist()
        per_step = [norm / max(1.0, header.age) for norm, header in zip(norms[:-1], headers, strict=True)]
        try:
            left_out = self.watch.check(fragment, per_step)
        except TrainingError as error:
            raise MergeError(str(error)) from error
        if left_out:
            weights = normalized(weights, left_out)
            mean, squares = self._optimizer.combine(fragment, messages, weights)
            norms = np.sqrt(self._sum(squares)).tolist()
            if self._islands.index == 0 and self._islands.island.rank == 0:
                for island, factor in left_out.items():
                    warn(
                        f"WARNING: the change of the parameters on island {island} was left out: its norm is "
                        f"{self.watch.describe(factor)}. If this happens again, check the hosts of the island"
                    )
        result = MergeResult(
            outer_norm=norms[-1],
            outer_cosine=_mean_cosine(norms[:-1], norms[-1], weights),
            contributions_left_out=len(left_out),
            # The ranks of an island share a fragment unevenly.
            bytes_between_islands=all_bytes * (num_islands - 1) / num_ranks,
            island_wait_s=all_waited_s / num_ranks,
        )
        return Received(headers, mean, any(weights), list(left_out), result)

    def close(self) -> None:
        """Free the window. Collective over all islands. Idempotent."""
        self.window.close()

    def _sum(self, values: Sequence[float]) -> list[float]:
        """Sum `values` over the ranks of the island. Collective over the island."""
        gathered = np.empty((self._islands.island.size, len(values)))
        request = self._comm.Iallgather(np.array(values, dtype=np.float64), gathered)
        self._islands.island.wait_collective(request, "synchronizing the ranks of an island")
        return gathered.sum(axis=0).tolist()


def _require_equal(differing: Sequence[float]) -> None:
    """Raise `MergeError` if the outer parameters of an island, on any of its ranks, differ from those of island 0."""
    for island, count in enumerate(differing):
        if count:
            raise MergeError(
                f"the outer parameters of islands 0 and {island} differ, probably because of a memory error on one of "
                "them: check the hosts of both, and resume from the last checkpoint"
            )


def _mean_cosine(norms: Sequence[float], mean_norm: float, weights: Sequence[float]) -> float:
    """Return the mean cosine over all pairs of islands' differences, weighted by the weights and norms of both.

    It follows from the norms alone, because the square of the mean contains the inner products of all pairs.
    """
    squares = sum((weight * norm) ** 2 for weight, norm in zip(weights, norms, strict=True) if weight)
    all_pairs = sum(weight * norm for weight, norm in zip(weights, norms, strict=True) if weight) ** 2
    return (mean_norm**2 - squares) / (all_pairs - squares) if all_pairs > squares else 0.0

"""Exchange of fragments between islands: sending differences, receiving those of all islands, and checking them."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.islands.outer_exchange import OuterExchange
from odc_mpi.errors import TrainingError, warn
from odc_mpi.islands.norm_watch import NormWatch
from odc_mpi.islands.outer_optimizer import OuterOptimizer, normalized
from odc_mpi.runtime.world import World


class SyncResult(NamedTuple):
    """Result of the synchronizations after one step, equal on all ranks.

    Attributes:
        outer_norm: Norm of the mean difference between outer and local parameters.
        outer_cosine: Weighted mean cosine over all pairs of islands whose differences were used; 0 without any pair.
        contributions_left_out: Number of differences that were left out because of their norms.
        bytes_between_islands: Bytes received from other islands in these synchronizations, as a mean over the ranks.
        island_wait_s: Time in seconds that a rank has waited for other islands, as a mean over the ranks.
    """

    outer_norm: float
    outer_cosine: float
    contributions_left_out: int
    bytes_between_islands: float
    island_wait_s: float


class Sent(NamedTuple):
    """Fragment whose differences are in flight.

    Attributes:
        weights: Weights of the islands in their mean difference.
        num_steps: Number of steps from which the differences result.
    """

    fragment: int
    weights: list[float]
    num_steps: int


class Received(NamedTuple):
    """Fragment whose differences have arrived.

    Attributes:
        mean: Mean difference, fp32 `[n]`, or None if no island has contributed.
        left_out: Islands whose differences were left out.
    """

    fragment: int
    mean: torch.Tensor | None
    left_out: list[int]
    result: SyncResult


class FragmentExchange:
    """Exchanges one fragment at a time between islands. Construction is collective.

    Args:
        message_bytes: Sizes in bytes of this rank's messages, one for each fragment.

    Attributes:
        watch: Watch on the norms of the islands' differences.
    """

    def __init__(
        self,
        world: World,
        islands: Islands,
        optimizer: OuterOptimizer,
        message_bytes: Sequence[int],
        norm_limit: float,
    ) -> None:
        self._world, self._islands, self._optimizer = world, islands, optimizer
        self._exchange = OuterExchange(world, islands)
        # The ranks of an island share a fragment unevenly.
        self._mean_bytes = self._exchange.gather(np.array(message_bytes)).mean(axis=0) * (islands.size - 1)
        self.watch = NormWatch(islands.size, len(message_bytes), norm_limit)

    def send(self, fragment: int, amounts: Sequence[float], num_steps: int) -> Sent:
        """Start gathering the differences of all islands, with weights `amounts`. Collective, but does not wait."""
        self._exchange.start(self._optimizer.encode(fragment))
        return Sent(fragment, normalized(amounts, {}), num_steps)

    def receive(self, sent: Sent) -> Received:
        """Wait for the differences of all islands. All islands leave out the same ones. Collective.

        Raises:
            TrainingError: The outer parameters of two islands differ, or an island was left out three times in a row.
        """
        fragment, weights, num_islands = sent.fragment, sent.weights, self._islands.size
        began = time.perf_counter()
        messages = self._exchange.wait()
        waited_s = time.perf_counter() - began
        mean, norms, wait_s = self._combine(fragment, messages, weights, waited_s)
        left_out = self.watch.check(fragment, [norm / sent.num_steps for norm in norms[:num_islands]])
        if left_out:
            weights = normalized(weights, left_out)
            mean, norms, _ = self._combine(fragment, messages, weights, 0.0)
            if self._world.rank == 0:
                for island, factor in left_out.items():
                    warn(
                        f"WARNING: the change of the parameters on island {island} was left out: its norm is "
                        f"{self.watch.describe(factor)}. If this happens again, check the hosts of the island"
                    )
        result = SyncResult(
            outer_norm=norms[-1],
            outer_cosine=_mean_cosine(norms[:num_islands], norms[-1], weights),
            contributions_left_out=len(left_out),
            bytes_between_islands=float(self._mean_bytes[fragment]),
            island_wait_s=wait_s,
        )
        return Received(fragment, mean if any(weights) else None, list(left_out), result)

    def close(self) -> None:
        """Wait for messages in flight, and free the communicator. Collective. Idempotent."""
        self._exchange.close()

    def _combine(
        self, fragment: int, messages: torch.Tensor, weights: Sequence[float], waited_s: float
    ) -> tuple[torch.Tensor, list[float], float]:
        """Return the mean difference, the norms of the islands' differences and of the mean, and the mean wait."""
        mean, squares = self._optimizer.combine(fragment, messages, weights)
        checksum = self._optimizer.checksum(fragment)
        rows = self._exchange.gather(np.array([*squares, checksum, waited_s]))
        num_islands, num_ranks = self._islands.size, self._islands.island.size
        checksums = rows[:, -2].reshape(num_islands, num_ranks)
        if (differing := np.flatnonzero((checksums != checksums[0]).any(axis=1))).size:
            raise TrainingError(
                f"the outer parameters of islands 0 and {differing[0]} differ, probably because of a memory error on "
                "one of them: check the hosts of both, and resume from the last checkpoint"
            )
        # The ranks of each island have the same parts of all differences: those of the first island decide.
        norms = np.sqrt(rows[:num_ranks, :-2].sum(axis=0)).tolist()
        return mean, norms, float(rows[:, -1].mean())


def _mean_cosine(norms: Sequence[float], mean_norm: float, weights: Sequence[float]) -> float:
    """Return the mean cosine over all pairs of islands' differences, weighted by the weights and norms of both.

    It follows from the norms alone, because the square of the mean contains the inner products of all pairs.
    """
    own = sum((weight * norm) ** 2 for weight, norm in zip(weights, norms, strict=True) if weight)
    all_pairs = sum(weight * norm for weight, norm in zip(weights, norms, strict=True) if weight) ** 2
    return (mean_norm**2 - own) / (all_pairs - own) if all_pairs > own else 0.0

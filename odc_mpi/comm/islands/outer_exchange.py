"""Exchange of fragments between islands that train separately, and of numbers between all ranks.

The ranks of a column exchange their differences with non-blocking all-gathers, which proceed while they compute: in the
calls of MPI that they make, or in the progress thread (`comm.progress`).
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.errors import TrainingError, warn
from odc_mpi.islands.norms import NormWatch
from odc_mpi.islands.outer_optimizer import OuterOptimizer, normalized
from odc_mpi.runtime.world import World

#: Messages are sent in units of this many bytes, so that counts fit into 32 bits.
_UNIT_BYTES = 4096
#: Messages are divided into at most `_MAX_PARTS` parts of at least `_MIN_PART_UNITS` units. Each arrival of a part
#: extends the deadline of ranks that wait, so a slow network is not taken for a fault.
_MAX_PARTS, _MIN_PART_UNITS = 64, 1024


class SyncResult(NamedTuple):
    """Result of the synchronizations after one step, which is the same on all ranks.

    Attributes:
        outer_norm: Norm of the mean difference between outer and local parameters.
        outer_cosine: Weighted mean cosine over all pairs of islands whose differences were used, or 0 if there is none.
        contributions_left_out: Number of differences that were left out because of their norms.
        bytes_between_islands: Bytes received from other islands in these synchronizations, averaged over the ranks.
        island_wait_s: Time in seconds spent waiting for other islands, averaged over the ranks.
    """

    outer_norm: float
    outer_cosine: float
    contributions_left_out: int
    bytes_between_islands: float
    island_wait_s: float


class Received(NamedTuple):
    """Fragment for which the differences of all islands have arrived.

    Attributes:
        mean: Mean difference, fp32 `[n]`, or None if no island has contributed.
        left_out: Islands whose differences were left out.
    """

    fragment: int
    mean: torch.Tensor | None
    left_out: list[int]
    result: SyncResult


class FragmentExchange:
    """Exchanges one fragment at a time between `islands`, into which `world` is divided. Construction is collective.

    Attributes:
        watch: `NormWatch` that decides which islands' differences are left out.
    """

    def __init__(self, world: World, islands: Islands, optimizer: OuterOptimizer, norm_limit: float) -> None:
        self._world, self._islands, self._optimizer = world, islands, optimizer
        self.watch = NormWatch(islands.size, len(optimizer.message_bytes), norm_limit)
        self._unit = MPI.BYTE.Create_contiguous(_UNIT_BYTES).Commit()
        with world.collective("duplicating the communicator"):
            self._numbers_comm = world.comm.Dup()
        self._requests: list[MPI.Request] = []
        self._sent = self._received = np.empty(0, dtype=np.uint8)
        self._in_flight: tuple[int, list[float], int] | None = None
        self._is_open = True
        world.on_close(self.close)
        # The ranks of an island share a fragment unevenly.
        self._mean_bytes = self._gather(np.array(optimizer.message_bytes)).mean(axis=0) * (islands.size - 1)

    def send(self, fragment: int, amounts: Sequence[float], num_steps: int) -> None:
        """Start gathering the islands' differences for a fragment. Collective, but does not wait.

        The differences result from `num_steps` steps. `amounts` contains each island's weight; these need not sum to 1.
        """
        assert not self._in_flight, "a message is in flight"
        self._in_flight = fragment, normalized(amounts, {}), num_steps
        message = self._optimizer.encode(fragment).cpu().numpy()
        num_units = -(-len(message) // _UNIT_BYTES)
        self._sent = np.zeros(num_units * _UNIT_BYTES, dtype=np.uint8)
        self._sent[: len(message)] = message
        self._received = np.empty((self._islands.size, self._sent.size), dtype=np.uint8)
        part_units = max(_MIN_PART_UNITS, -(-num_units // _MAX_PARTS))
        for first in range(0, num_units, part_units):
            count = min(part_units, num_units - first)
            to_send = [self._sent[first * _UNIT_BYTES :], count, self._unit]
            offsets = [island * num_units + first for island in range(self._islands.size)]
            received = [self._received, [count] * self._islands.size, offsets, self._unit]
            self._requests.append(self._islands.column.comm.Iallgatherv(to_send, received))

    def receive(self) -> Received | None:
        """Wait for the differences in flight, and return their mean. Collective.

        If `watch` rejects the differences of some islands, all ranks leave them out. Returns None if no fragment has
        been sent since the last call.

        Raises:
            TrainingError: The outer parameters of two islands differ, or an island was left out three times in a row.
        """
        if self._in_flight is None:
            return None
        (fragment, weights, num_steps), num_islands = self._in_flight, self._islands.size
        self._in_flight = None
        began = time.perf_counter()
        messages = self._wait()[:, : self._optimizer.message_bytes[fragment]]
        waited_s = time.perf_counter() - began
        mean, norms, wait_s = self._combine(fragment, messages, weights, waited_s)
        left_out = self.watch.check(fragment, [norm / num_steps for norm in norms[:num_islands]])
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
        """Wait for a message in flight, and free the communicator. Collective. Call this before closing the islands."""
        if self._is_open:
            self._is_open = False
            self._wait()
            self._numbers_comm.Free()
            self._unit.Free()
            self._world.cancel_on_close(self.close)

    def _wait(self) -> torch.Tensor:
        """Return the padded messages of this rank's column, `[islands, n]` uint8, once all have arrived. Collective."""
        num_parts = len(self._requests)
        for number, request in enumerate(self._requests, 1):
            part = f" (part {number} of {num_parts})" if num_parts > 1 else ""
            self._islands.column.wait_collective(request, f"receiving the parameters of other islands{part}")
        received = torch.from_numpy(self._received)
        self._requests, self._sent, self._received = [], np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.uint8)
        return received

    def _gather(self, values: np.ndarray) -> np.ndarray:
        """Gather the values of all ranks of the world, each `[k]`, as float64 `[size, k]`. Collective."""
        gathered = np.empty((self._world.size, values.size))
        request = self._numbers_comm.Iallgather(np.ascontiguousarray(values, dtype=np.float64), gathered)
        self._world.wait_collective(request, "synchronizing the islands")
        return gathered

    def _combine(
        self, fragment: int, messages: torch.Tensor, weights: Sequence[float], waited_s: float
    ) -> tuple[torch.Tensor, list[float], float]:
        """Return the mean difference, the norms of the islands' differences and of the mean, and the mean wait."""
        mean, squares = self._optimizer.combine(fragment, messages, weights)
        checksum = self._optimizer.checksum(fragment)
        rows = self._gather(np.array([*squares, checksum, waited_s]))
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
    squares = sum((weight * norm) ** 2 for weight, norm in zip(weights, norms, strict=True) if weight)
    all_pairs = sum(weight * norm for weight, norm in zip(weights, norms, strict=True) if weight) ** 2
    return (mean_norm**2 - squares) / (all_pairs - squares) if all_pairs > squares else 0.0

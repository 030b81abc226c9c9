"""Outer loop: islands train separately, and synchronize fragments of their parameters every few steps.

send     encode the difference of a fragment, and start gathering those of all islands      does not wait
receive  wait for them, compute their mean, and compare their norms                         collective
apply    update the outer parameters, and continue training from them
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.islands.outer_exchange import OuterExchange
from odc_mpi.errors import UserError, warn
from odc_mpi.islands.encoding import make_encoding
from odc_mpi.islands.fragments import ParameterSlice, Schedule, make_fragments
from odc_mpi.islands.norm_watch import NormWatch
from odc_mpi.islands.outer_optimizer import OuterOptimizer, normalized
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.islands.settings import check_schedule


class SyncResult(NamedTuple):
    """Result of the synchronizations after one step, equal on all ranks.

    Attributes:
        outer_norm: Norm of the mean difference between outer and local parameters.
        outer_cosine: Weighted mean of the cosines between the differences of two islands; 0 if only one is used.
        contributions_left_out: Number of differences that were left out because of `norm_limit`.
        bytes_between_islands: Bytes that a rank has received from other islands, as a mean over the ranks.
        island_wait_s: Time in seconds that a rank has waited for other islands, as a mean over the ranks.
    """

    outer_norm: float
    outer_cosine: float
    contributions_left_out: int
    bytes_between_islands: float
    island_wait_s: float


class InFlight(NamedTuple):
    """Fragment that was sent, but not yet applied.

    Attributes:
        weights: Weights of the islands in their mean difference.
        mean: Mean difference, fp32 `[n]`, or None until it has been received.
        result: Result of the synchronization, or None until the mean has been received, and after a restart.
    """

    fragment: int
    weights: list[float]
    mean: torch.Tensor | None = None
    result: SyncResult | None = None


class OuterLoop:
    """Synchronizes islands that train separately (DiLoCo and Streaming DiLoCo, docs/islands.md).

    Call `step` after each step of the optimizer and before `model.publish()`. Construction is collective, and follows
    that of the optimizer's model. With a `Loader` that has the same number of islands, divide the gradients by
    `minibatch.island_share`, and pass `minibatch.island_tokens` to `step`.

    Args:
        model: Model that is sharded over `islands`, whose mode must be "outer".
        sync_every: Number of steps in which each fragment is synchronized once. A multiple of `fragments`.
        fragments: Number of fragments of the parameters, which are synchronized at different steps.
        delay: Number of steps between sending a fragment and applying the result, less than `sync_every / fragments`.
        local_share: Share of its own parameters with which an island continues, from 0 to 1.
        learning_rate: Learning rate of the outer optimizer, SGD with Nesterov momentum.
        momentum: Momentum of the outer optimizer. 0 for none.
        wire: Encoding of the differences: "float32", "bfloat16", "int8" or "e3m0".
        error_feedback: True to add what the encoding has lost to the next difference.
        norm_limit: Differences are left out if their norms exceed this multiple of the usual norm. 0 for no limit.

    Attributes:
        index: Index of this rank's island.
        num_islands: Number of islands.

    Raises:
        UserError: There is a single island, the islands have another mode, or `sync_every`, `fragments` and `delay` do
            not fit together.
    """

    def __init__(
        self,
        world: World,
        model: ShardedModel,
        islands: Islands,
        *,
        sync_every: int = 30,
        fragments: int = 1,
        delay: int = 0,
        local_share: float = 0.0,
        learning_rate: float = 0.7,
        momentum: float = 0.5,
        wire: str = "float32",
        error_feedback: bool = False,
        norm_limit: float = 10.0,
    ) -> None:
        if islands.mode != "outer":
            raise UserError(f"islands: expected the mode outer, got {islands.mode}: construct Islands with mode outer")
        if islands.size == 1:
            raise UserError("islands: expected two or more, got 1: train without an outer loop")
        check_schedule(sync_every, fragments, delay)
        self._world, self._model, self._islands = world, model, islands
        self.index, self.num_islands = islands.index, islands.size
        self._schedule = Schedule(sync_every, fragments, delay)
        slices = [each for each, _ in model.slices() if each.spec.requires_grad]
        self._names = [each.spec.name for each in slices]
        own = [ParameterSlice(each.spec.name, each.spec.numel, each.start, each.stop) for each in slices]
        parts, self._encoding = make_fragments(own, fragments), make_encoding(wire)
        self._optimizer = OuterOptimizer(
            model.shard_parameters(),
            parts,
            self._encoding,
            learning_rate=learning_rate,
            momentum=momentum,
            local_share=local_share,
            error_feedback=error_feedback,
        )
        self._exchange = OuterExchange(world, islands)
        sizes = np.array([self._encoding.num_bytes(part.num_elements) for part in parts])
        # The ranks of an island share a fragment unevenly.
        self._mean_bytes = self._exchange.gather(sizes).mean(axis=0) * (islands.size - 1)
        self._watch = NormWatch(islands.size, fragments, norm_limit)
        self._num_steps = 0  # since the start, or since all fragments were synchronized
        # Loss tokens of each island since each fragment was last sent.
        self._tokens = np.zeros((fragments, islands.size))
        self._in_flight: InFlight | None = None
        # Mean difference of the fragment in flight, from a checkpoint.
        self._gradient: list[torch.Tensor] | None = None

    def step(self, tokens: Sequence[float], *, sync_all: bool = False) -> SyncResult | None:
        """Send and apply the fragments that are due after a step. Collective, but waits only to apply a fragment.

        Args:
            tokens: Number of loss tokens on which each island has trained in this step, which determine its weight.
            sync_all: True to synchronize all fragments now, as after the last step of a run.

        Returns:
            The result of the synchronizations, or None if there was none.
        """
        self._num_steps += 1
        self._tokens += np.asarray(tokens, dtype=np.float64)
        results = []
        if sync_all:
            results += [self._apply()] if self._in_flight else []
            for fragment in range(len(self._tokens)):
                self._send(fragment)
                results.append(self._apply())
            self._num_steps = 0
        else:
            if (due := self._schedule.to_send(self._num_steps)) is not None:
                self._send(due)
            if self._in_flight and self._schedule.to_apply(self._num_steps) is not None:
                results.append(self._apply())
        return _merge(results)

    def receive(self) -> None:
        """Wait for the fragment in flight, if any, so that `shared_tensors` contains it. Collective."""
        if self._in_flight and self._in_flight.mean is None:
            self._in_flight = self._receive(self._in_flight)

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Context manager in which the model of each island has the outer parameters, for an evaluation. Collective.

        If the enclosed code raises an exception, this rank's slices get their values back without being published.
        """
        slices = self._model.shard_parameters()
        local = [each.detach().clone() for each in slices]
        self._model.overwrite_parameters(self._optimizer.outer)
        try:
            yield
        except BaseException:
            for each, value in zip(slices, local, strict=True):
                each.data.copy_(value)
            raise
        self._model.overwrite_parameters(local)

    def _send(self, fragment: int) -> None:
        with self._model.spans.span("outer_sync"):
            self._exchange.start(self._optimizer.encode(fragment))
        weights = normalized(self._tokens[fragment].tolist(), {})
        self._tokens[fragment] = 0.0
        self._in_flight = InFlight(fragment, weights)

    def _receive(self, sent: InFlight) -> InFlight:
        """Receive the differences of all islands. All islands decide alike which of them are left out. Collective."""
        fragment, num_islands, num_ranks = sent.fragment, self.num_islands, self._islands.island.size
        began = time.perf_counter()
        messages = self._exchange.wait()
        waited_s, weights, excluded = time.perf_counter() - began, sent.weights, dict[int, float]()
        while True:
            mean, squares = self._optimizer.combine(fragment, messages, weights)
            rows = self._exchange.gather(np.array([*squares, waited_s]))
            # The ranks of each island have the same parts of all differences: those of the first island decide.
            norms = np.sqrt(rows[:num_ranks, :-1].sum(axis=0)).tolist()
            if excluded:
                break
            excluded = self._watch.check(fragment, norms[:num_islands])
            if not excluded:
                break
            weights = normalized(weights, excluded)
            if self._world.rank == 0:
                for island, factor in excluded.items():
                    warn(_describe_exclusion(island, factor))
        result = SyncResult(
            outer_norm=norms[-1],
            outer_cosine=_mean_cosine(norms[:num_islands], norms[-1], weights),
            contributions_left_out=len(excluded),
            bytes_between_islands=float(self._mean_bytes[fragment]),
            island_wait_s=float(rows[:, -1].mean()),
        )
        return InFlight(fragment, weights, mean, result)

    def _apply(self) -> SyncResult:
        with self._model.spans.span("outer_sync"):
            self.receive()
            assert self._in_flight
            fragment, weights, mean, result = self._in_flight
            assert mean is not None and result is not None
            self._optimizer.apply(fragment, mean if any(weights) else None)
        self._in_flight = None
        return result

    def shared_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors that are equal on all islands, by kind and by parameter name.

        They are shaped like this rank's slices: the outer parameters ("model"), the momentum, and the mean difference
        of the fragment in flight ("outer/gradient"), if any. Call `receive` before.
        """
        tensors = {"model": self._optimizer.outer, "outer/momentum_buffer": self._optimizer.velocities}
        if self._in_flight:
            assert self._in_flight.mean is not None
            tensors["outer/gradient"] = self._optimizer.spread(self._in_flight.fragment, self._in_flight.mean)
        return {kind: self._by_name(slices) for kind, slices in tensors.items()}

    def island_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors of this island, as `shared_tensors` does: the residual, if there is one."""
        residuals = self._optimizer.residuals
        return {} if residuals is None else {"residual": self._by_name(residuals)}

    def load_tensors(self, read: Callable[[str, str], torch.Tensor | None]) -> None:
        """Restore the tensors that `shared_tensors` and `island_tensors` return.

        `read` returns this rank's slice of a parameter, given the kind of tensor and the parameter's name, or None.
        """

        def read_all(kind: str, targets: Sequence[torch.Tensor]) -> bool:
            found = [(target, read(kind, name)) for name, target in zip(self._names, targets, strict=True)]
            for target, value in found:
                if value is not None:
                    target.copy_(value)
            return any(value is not None for _, value in found)

        read_all("model", self._optimizer.outer)
        read_all("outer/momentum_buffer", self._optimizer.velocities)
        if self._optimizer.residuals is not None:
            read_all("residual", self._optimizer.residuals)
        gradient = [torch.zeros_like(each) for each in self._optimizer.outer]
        self._gradient = gradient if read_all("outer/gradient", gradient) else None

    def _by_name(self, slices: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(zip(self._names, slices, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable state, which is equal on all ranks. Call `receive` before."""
        sent = self._in_flight
        return {
            "schedule": asdict(self._schedule),
            "num_steps": self._num_steps,
            "tokens": self._tokens.tolist(),
            "in_flight": [sent.fragment, sent.weights, list(sent.result or ())] if sent else None,
            "norm_watch": self._watch.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, after the tensors.

        With another schedule, a new one starts. With another number of islands, all start from the outer parameters.
        """
        if state["schedule"] != asdict(self._schedule):
            return
        self._num_steps = state["num_steps"]
        if state["in_flight"] and self._gradient is not None:
            fragment, weights, result = state["in_flight"]
            mean = self._optimizer.collect(fragment, self._gradient)
            self._in_flight = InFlight(fragment, weights, mean, SyncResult(*result))
        self._gradient = None
        tokens = np.array(state["tokens"])
        if tokens.shape == self._tokens.shape:
            self._tokens = tokens
            self._watch.load_state_dict(state["norm_watch"])


def _describe_exclusion(island: int, factor: float) -> str:
    amount = f"{factor:.3g} times the usual norm" if math.isfinite(factor) else "a norm that is not finite"
    return (
        f"WARNING: the change of the parameters on island {island} has {amount} and is left out (islands.norm_limit): "
        "check the hosts of this island if this happens again"
    )


def _mean_cosine(norms: Sequence[float], mean_norm: float, weights: Sequence[float]) -> float:
    """Return the mean cosine between the differences of two islands, weighted by the weights of both.

    It follows from the norms alone, because the square of the mean contains the inner products of all pairs.
    """
    own = sum((weight * norm) ** 2 for weight, norm in zip(weights, norms, strict=True) if weight)
    all_pairs = sum(weight * norm for weight, norm in zip(weights, norms, strict=True) if weight) ** 2
    return (mean_norm**2 - own) / (all_pairs - own) if all_pairs > own else 0.0


def _merge(results: Sequence[SyncResult]) -> SyncResult | None:
    if len(results) < 2:
        return results[0] if results else None
    norms, cosines, left_out, num_bytes, waits = zip(*results, strict=True)
    return SyncResult(math.hypot(*norms), sum(cosines) / len(cosines), sum(left_out), sum(num_bytes), sum(waits))

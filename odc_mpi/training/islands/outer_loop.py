"""Outer loop: islands train separately, and synchronize fragments of their parameters every few steps.

send     encode the difference of a fragment, and start gathering those of all islands      does not wait
receive  wait for them, compute their mean, and compare their norms                         collective
apply    update the outer parameters, and continue training from them
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.islands.outer_exchange import FragmentExchange, Received, SyncResult
from odc_mpi.errors import UserError
from odc_mpi.islands.encoding import make_encoding
from odc_mpi.islands.fragments import Schedule, make_fragments
from odc_mpi.islands.outer_optimizer import OuterOptimizer
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.islands.settings import check_schedule


class OuterLoop:
    """Synchronizes islands that train separately (DiLoCo and Streaming DiLoCo, docs/islands.md).

    Construction is collective. Call `step` after each step of the optimizer and before `model.publish()`. With a
    `Loader` that has the same number of islands, divide the gradients by `minibatch.island_share` before clipping,
    unless the share is 0, and pass `minibatch.island_amounts` to `step`.

    Args:
        world: World that is divided into the islands.
        model: Model that is sharded over the islands.
        islands: At least two islands in mode "outer".
        sync_every: Number of steps in which each fragment is synchronized once. Must be a multiple of `fragments`.
        fragments: Number of parts of the parameters that are synchronized at different steps.
        delay: Steps between sending a fragment and applying the result. Must be less than `sync_every / fragments`.
        local_share: After synchronization, islands continue from `local_share * local + (1 - local_share) * outer`.
        learning_rate: Learning rate of the outer optimizer, which is SGD with Nesterov momentum.
        momentum: Momentum of the outer optimizer, or 0 for none.
        wire: Encoding of the differences: "float32", "bfloat16", "int8" or "e3m0".
        error_feedback: True to add the encoding's rounding errors to the fragment's next difference.
        norm_limit: A difference is left out if its norm exceeds this multiple of the usual norm. If this is 0, only
            non-finite differences are left out.

    Raises:
        UserError: There is only one island, the islands are in another mode, the model's slices are not fp32, or the
            combination of `sync_every`, `fragments` and `delay` is invalid.
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
        self._model = model
        self.index, self.num_islands = islands.index, islands.size
        self._schedule = Schedule(sync_every, fragments, delay)
        if any(each.dtype != torch.float32 for each in model.shard_parameters()):
            raise UserError(
                "an outer loop requires float32 slices, got float64: shard the model with param_dtype float32"
            )
        slices = [each for each, _ in model.slices() if each.spec.requires_grad]
        self._names = [each.spec.name for each in slices]
        self._fragments = make_fragments([(each.spec.numel, each.start, each.stop) for each in slices], fragments)
        self._optimizer = OuterOptimizer(
            model.shard_parameters(),
            self._fragments,
            make_encoding(wire),
            learning_rate=learning_rate,
            momentum=momentum,
            local_share=local_share,
            error_feedback=error_feedback,
        )
        self._exchange = FragmentExchange(world, islands, self._optimizer, norm_limit)
        self._num_steps = 0
        # Loss tokens or pairs of each island, and steps, since each fragment was last sent.
        self._amounts = np.zeros((fragments, islands.size))
        self._ages = np.zeros(fragments, dtype=np.int64)
        self._received: Received | None = None
        # Loaded mean difference of the fragment in flight, with zeros outside the fragment.
        self._gradient: list[torch.Tensor] | None = None

    def step(self, amounts: Sequence[float], *, sync_all: bool = False) -> SyncResult | None:
        """Send and apply the fragments that are due after a step. Collective, but waits only if it applies a fragment.

        Args:
            amounts: Number of loss tokens or pairs on which each island has trained in this step. The islands'
                differences are weighted by the sums of these numbers since the fragment was last sent.
            sync_all: True to synchronize all fragments now, without delay, and to restart the schedule.

        Returns:
            The merged result of the synchronizations, or None if there were none.

        Raises:
            TrainingError: The same island was left out three times in a row, or outer parameters differ between
                islands. All ranks raise this error.
        """
        self._num_steps += 1
        self._ages += 1
        self._amounts += np.asarray(amounts, dtype=np.float64)
        results: list[SyncResult | None] = []
        if sync_all:
            self._num_steps = 0
            results.append(self._apply())
            for fragment in range(len(self._ages)):
                self._send(fragment)
                results.append(self._apply())
        else:
            if (due := self._schedule.to_send(self._num_steps)) is not None:
                self._send(due)
            if self._schedule.to_apply(self._num_steps) is not None:
                results.append(self._apply())
        return merge_results(results)

    def average(self) -> SyncResult | None:
        """Set the outer and local parameters to the weighted mean of all islands' local parameters. Collective.

        Call this once, after the last `step` of a run and before `model.publish()`. A fragment in flight is applied
        first. Fragments that the last `step` synchronized are not changed. The outer optimizer is not used, because its
        momentum is meant for the differences of `sync_every` steps.
        """
        results = [self._apply()]
        for fragment in np.flatnonzero(self._ages).tolist():
            self._send(fragment)
            results.append(self._apply(average=True))
        return merge_results(results)

    def receive(self) -> None:
        """Wait for the fragment in flight, if any, so that `tensors` contains it. Collective."""
        self._received = self._received or self._exchange.receive()

    def close(self) -> None:
        """Free the communicator. Collective. Idempotent. Call this before the model is closed."""
        self._exchange.close()

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Context manager in which each island's model has the outer parameters. Collective on entry and on exit.

        If the enclosed code raises an exception, this rank's slices are restored but not published, so the model can be
        saved but not used.
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
            self._exchange.send(fragment, self._amounts[fragment].tolist(), int(self._ages[fragment]))
        self._amounts[fragment], self._ages[fragment] = 0.0, 0

    def _apply(self, *, average: bool = False) -> SyncResult | None:
        """Apply the fragment in flight, if any. Collective."""
        with self._model.spans.span("outer_sync"):
            self.receive()
            received, self._received = self._received, None
            if received is None:
                return None
            if average and received.mean is not None:
                self._optimizer.average(received.fragment, received.mean)
            else:
                was_left_out = self.index in received.left_out
                self._optimizer.apply(received.fragment, received.mean, keep_local=not was_left_out)
        return received.result

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors to save, keyed by kind and then by parameter name. Call `receive` first.

        All have the shapes of this rank's slices. They are the outer parameters ("model"), the momentum and, if
        present, this island's "residual" and the mean difference of the fragment in flight ("outer/gradient"). All
        except the residual are equal on all islands. Only the first island returns "outer/gradient".
        """
        tensors = self._slices_by_kind()
        if self.index == 0 and self._received and self._received.mean is not None:
            tensors["outer/gradient"] = [torch.zeros_like(each) for each in self._optimizer.outer]
            self._fragments[self._received.fragment].write(self._received.mean, tensors["outer/gradient"])
        return {kind: dict(zip(self._names, slices, strict=True)) for kind, slices in tensors.items()}

    def load_tensors(self, read: Callable[[str, str], torch.Tensor | None]) -> None:
        """Restore the tensors that `tensors` returned.

        Given a kind and a parameter name, `read` returns this rank's slice of the tensor, or None if it is missing.
        """
        gradient, self._gradient = [torch.zeros_like(each) for each in self._optimizer.outer], None
        for kind, targets in (self._slices_by_kind() | {"outer/gradient": gradient}).items():
            for name, target in zip(self._names, targets, strict=True):
                if (value := read(kind, name)) is not None:
                    target.copy_(value)
                    self._gradient = gradient if targets is gradient else self._gradient

    def _slices_by_kind(self) -> dict[str, list[torch.Tensor]]:
        optimizer = self._optimizer
        residuals = {} if optimizer.residuals is None else {"residual": optimizer.residuals}
        return {"model": optimizer.outer, **residuals, "outer/momentum_buffer": optimizer.velocities}

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable state, which is equal on all ranks. Call `receive` first."""
        received = self._received
        return {
            "schedule": asdict(self._schedule),
            "num_steps": self._num_steps,
            "amounts": self._amounts.tolist(),
            "ages": self._ages.tolist(),
            "in_flight": [received.fragment, received.left_out, list(received.result)] if received else None,
            "norm_watch": self._exchange.watch.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned. Call `load_tensors` first.

        If the schedule has changed, it restarts. If the number of islands has changed, all start from outer parameters.
        """
        gradient, self._gradient = self._gradient, None
        amounts = np.array(state["amounts"])
        if amounts.shape == self._amounts.shape:
            self._amounts, self._ages = amounts, np.array(state["ages"])
            self._exchange.watch.load_state_dict(state["norm_watch"])
        if state["schedule"] != asdict(self._schedule):
            return
        self._num_steps = state["num_steps"]
        if state["in_flight"]:
            fragment, left_out, result = state["in_flight"]
            mean = self._fragments[fragment].read(gradient) if gradient else None
            left_out = left_out if amounts.shape == self._amounts.shape else []
            self._received = Received(fragment, mean, left_out, SyncResult(*result))


def merge_results(results: Sequence[SyncResult | None]) -> SyncResult | None:
    """Merge the results of all synchronizations after a step. Return None if there were none."""
    present = [each for each in results if each]
    if len(present) < 2:
        return present[0] if present else None
    norms, cosines, left_out, num_bytes, waits = zip(*present, strict=True)
    return SyncResult(math.hypot(*norms), sum(cosines) / len(cosines), sum(left_out), sum(num_bytes), sum(waits))

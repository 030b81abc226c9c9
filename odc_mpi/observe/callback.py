"""Callbacks of the training loop. Objectives, minibatch sources and the optimizer step are callbacks, too.

Only hooks marked "May be collective" call collectives, unless all ranks are about to raise an error. The `local_values`
of all callbacks are part of the all-gather that completes the gradients, and need no communication of their own
(docs/ordering.md). This module does not import torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from odc_mpi.observe.metrics import Metric

if TYPE_CHECKING:
    import torch

    from odc_mpi.data.loader import PlannedMinibatch
    from odc_mpi.data.microbatch import Microbatch
    from odc_mpi.shard.minibatch_stats import MinibatchStats

#: Number of fraction bits of a rounded summand, relative to the leading bit of `max_magnitude`.
_EXACT_SUM_BITS = 44


def round_for_exact_sum(value: float, max_magnitude: float) -> float:
    """Round a summand so that float64 sums of rounded summands are exact, regardless of the order of summation.

    `max_magnitude` must be positive and at least as large as the magnitude of every summand. Finite values are rounded
    to multiples of a unit of at most 2**-44 times `max_magnitude`. Sums below 2**8 times `max_magnitude` are exact.
    """
    unit = 2.0 ** (math.frexp(max_magnitude)[1] - 1 - _EXACT_SUM_BITS)
    return round(value / unit) * unit if math.isfinite(value) else value


@dataclass
class Step:
    """Data and metrics of one step of a run.

    Attributes:
        number: Number of the step, starting at 1.
        minibatch: Minibatch of the step, with the data of all ranks.
        metrics: Metrics that callbacks add, which are written as a line of ``metrics.jsonl``. They are equal on all
            ranks, except for values that depend on the rank's clock.
        failure: Error to raise after all callbacks have run `on_step_end`, set on all ranks, or None to continue.
    """

    number: int
    minibatch: "PlannedMinibatch"
    metrics: dict[str, Any]
    failure: Exception | None = None


class MicrobatchResult(NamedTuple):
    """Result of one microbatch on this rank.

    Attributes:
        loss: Contribution of the microbatch to the loss of the minibatch.
        statistics: Additional values that the objective computed for the microbatch.
        began, ended: Start and end in seconds, as returned by `time.perf_counter`.
        busy_s: Duration in seconds, including fetches and pushes, but not waits for slower ranks.
    """

    microbatch: "Microbatch"
    loss: float
    statistics: Sequence[float]
    began: float
    ended: float
    busy_s: float


class Callback:
    """Base class with the hooks of the training loop. The hooks do nothing unless a subclass overrides them.

    Attributes:
        gathered_names: Names of the `local_values`, the same on all ranks and different from those of other callbacks.
        metrics: Declarations of all metrics that the callback adds to those of a step, or returns at the end.
    """

    gathered_names: Sequence[str] = ()
    metrics: Sequence[Metric] = ()

    @property
    def allows_saving(self) -> bool:
        """True if a checkpoint may be saved after this step. Otherwise, one that is due is saved after a later step."""
        return True

    @property
    def requests_saving(self) -> bool:
        """True on all ranks if a checkpoint is to be saved after this step, even if none is due."""
        return False

    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        """Prepare for training. May be collective.

        `completed_steps` is the number of steps that the run completed before it was resumed. `metrics` initially has
        only the key `step`. If callbacks add metrics, such as those of an evaluation, they are written as a line of
        ``metrics.jsonl``.
        """

    def on_step_begin(self, step: Step) -> None:
        """Prepare for a step. Called before the first microbatch."""

    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        """Process the result of a microbatch. Called on the rank that ran the microbatch.

        On a GPU, this is called at the end of the minibatch, for each of its microbatches in order.
        """

    def local_values(self) -> Sequence[float]:
        """Return this rank's values, one for each of `gathered_names`. The loop gathers the values of all ranks."""
        return ()

    def on_gathered(self, step: Step, gathered: "MinibatchStats") -> None:
        """Process the gathered values before the optimizer step. The outcome must be the same on all ranks."""

    def on_optimizer_step(self, step: Step) -> None:
        """Change this rank's slices after the optimizer step, before they are published. May be collective."""

    def on_step_end(self, step: Step) -> None:
        """Process a completed step, after its updated parameters are published. May be collective."""

    def on_train_end(self) -> Mapping[str, Any]:
        """Finish the run, and return entries for ``summary.json``. May be collective."""
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state that a resumed run needs, as JSON-serializable entries for the checkpoint."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`, the merged result of the `state_dict` methods of all callbacks.

        Raises `UserError` if the state does not match this run.
        """

    def tensors(self) -> "Mapping[str, Mapping[str, torch.Tensor]]":
        """Return tensors to save in checkpoints, keyed by section and then by parameter name.

        Each has the shape of this rank's slice of the trainable parameter. Tensors in the section "model" are saved
        there instead of the parameters, for exports and other runs. Then "local" has the parameters, from which the run
        resumes: the model reads them, not `load_tensors`.
        """
        return {}

    def load_tensors(self, read: "Callable[[str, str], torch.Tensor | None]") -> None:
        """Restore the tensors that `tensors` returned. Called after `load_state_dict`.

        Given a section and a parameter name, `read` returns this rank's slice, or None if the checkpoint lacks it.
        """

    def close(self) -> None:
        """Release resources. Called at the end of every run, even if the run fails."""

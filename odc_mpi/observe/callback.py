"""Callbacks of the training loop. Objectives, minibatch sources and the optimizer step are also callbacks.

Only hooks that may be collective communicate. The `local_values` travel with the all-gather that completes the
gradients, so a callback adds no communication (docs/ordering.md). This module does not import torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from odc_mpi.observe.metrics import ProgressColumn, SummaryField

if TYPE_CHECKING:
    from odc_mpi.data.loader import Minibatch
    from odc_mpi.data.microbatch import Microbatch
    from odc_mpi.shard import model as sharded

#: Bits of a rounded summand, counted from the leading bit of `max_magnitude`.
_EXACT_SUM_BITS = 44


def round_for_exact_sum(value: float, max_magnitude: float) -> float:
    """Round a summand so that float64 sums of such summands are exact in any order of summation.

    Args:
        value: Summand to round. A non-finite value is returned unchanged.
        max_magnitude: Upper bound of the magnitudes of all summands, above 0. The rounding unit is at most 2**-44 of
            this bound. Sums below 2**8 times this bound are exact.
    """
    unit = 2.0 ** (math.frexp(max_magnitude)[1] - 1 - _EXACT_SUM_BITS)
    return round(value / unit) * unit if math.isfinite(value) else value


@dataclass
class Step:
    """One step of a run.

    Attributes:
        number: Number of the step, counted from 1.
        minibatch: Minibatch of the step, with the data of all ranks.
        metrics: Metrics that the callbacks add. They become one line of ``metrics.jsonl`` and are equal on all ranks,
            except for values that depend on this rank's clock.
        failure: Error that ends the run after all hooks `on_step_end`, set on every rank; None to continue.
    """

    number: int
    minibatch: "Minibatch"
    metrics: dict[str, Any]
    failure: Exception | None = None


class MicrobatchResult(NamedTuple):
    """A microbatch that this rank has run.

    Attributes:
        loss: Contribution of the microbatch to the objective.
        began: Start time on the clock `time.perf_counter`, in seconds.
        ended: End time on the same clock, in seconds.
        busy_s: Time of the work, in seconds. Includes fetches and pushes, but not waits for slower ranks.
    """

    microbatch: "Microbatch"
    loss: float
    began: float
    ended: float
    busy_s: float


class Callback:
    """Base class with the hooks of the training loop. The hooks do nothing unless a subclass overrides them.

    Attributes:
        gathered_names: Names of the `local_values`. Equal on all ranks, and not used by any other callback.
        columns: Columns that the callback adds to the progress line on the terminal.
        summary: Entries of ``summary.json`` that are reduced from this callback's metrics, by key.
    """

    gathered_names: Sequence[str] = ()
    columns: ClassVar[Sequence[ProgressColumn]] = ()
    summary: ClassVar[Mapping[str, SummaryField]] = {}

    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        """Prepare for training. May be collective.

        Args:
            completed_steps: Number of steps before this start; 0 unless the run is resumed.
            metrics: Metrics of the state before the first step, with `step`. If callbacks add others, such as those of
                an evaluation, they become a line of ``metrics.jsonl``.
        """

    def on_step_begin(self, step: Step) -> None:
        """Prepare for a step. Called before the first microbatch."""

    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        """Process the result of a microbatch that this rank has run."""

    def local_values(self) -> Sequence[float]:
        """Return this rank's values for the all-gather, one for each of `gathered_names`."""
        return ()

    def on_gathered(self, step: Step, gathered: "sharded.MinibatchStats") -> None:
        """Process the gathered values of all ranks before the optimizer step, with the same outcome on every rank."""

    def on_step_end(self, step: Step) -> None:
        """Run after a step, when the parameters are published and the metrics are complete. May be collective."""

    def on_train_end(self) -> Mapping[str, Any]:
        """Finish the run and return entries of ``summary.json``. May be collective."""
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state on which the next step depends, as JSON-serializable entries of a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore this callback's state from the merged `state_dict` of all callbacks.

        Raises a UserError if the state does not match this run.
        """

    def close(self) -> None:
        """Release resources. Called at the end of every run, including one that fails."""

"""Callbacks of the training loop. Objectives, minibatch sources and the optimizer step are callbacks, too.

    on_train_begin     before the first step; may be collective
    on_step_begin      before the first microbatch
    on_microbatch_end  after each microbatch of this rank
    local_values       gradients complete: this rank's values for the all-gather, one for each of `gathered_names`
    on_gathered        after the all-gather, before the optimizer step: the values of all ranks
    on_step_end        parameters published; may be collective (checkpoints, evaluation)
    on_train_end       after the last step; may be collective; returns entries of summary.json

The other hooks do not communicate. Values travel with the all-gather that completes the gradients, so a callback adds
no communication (docs/ordering.md). This module does not import torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from odc_mpi.observe.metrics import ProgressColumn, SummaryField

if TYPE_CHECKING:
    from odc_mpi.data.loader import Microbatch, Minibatch
    from odc_mpi.shard import model as sharded

#: Bits of a rounded summand, counted from the leading bit of `max_magnitude`.
_EXACT_SUM_BITS = 44


def round_for_exact_sum(value: float, max_magnitude: float) -> float:
    """Round a summand so that float64 sums are exact and independent of the order of summation.

    Args:
        value: Non-finite values are returned unchanged.
        max_magnitude: Bound of all summands, above 0; the same for all of them. The rounding unit is at most 2**-44 of
            it, and sums below 2**8 times it are exact.
    """
    unit = 2.0 ** (math.frexp(max_magnitude)[1] - 1 - _EXACT_SUM_BITS)
    return round(value / unit) * unit if math.isfinite(value) else value


@dataclass
class Step:
    """One step of a run.

    Attributes:
        number: Counted from 1.
        minibatch: Data of all ranks.
        metrics: Line of ``metrics.jsonl``, filled by the callbacks. Equal on all ranks, except for values that depend
            on this rank's clock.
    """

    number: int
    minibatch: "Minibatch"
    metrics: dict[str, Any]


class MicrobatchResult(NamedTuple):
    """A microbatch that this rank has run.

    Attributes:
        loss: Contribution to the objective.
        began: Start, in seconds of `time.perf_counter`.
        ended: End, likewise.
        busy_s: Seconds of work, including fetches and pushes, without waits for slower ranks.
    """

    microbatch: "Microbatch"
    loss: float
    began: float
    ended: float
    busy_s: float


class Callback:
    """Hooks of the training loop. Every hook has no effect unless a subclass overrides it.

    Attributes:
        gathered_names: Names of `local_values`. Equal on all ranks, and different from those of other callbacks.
        columns: Columns of the progress line on the terminal.
        summary: Entries of ``summary.json`` that are reduced from this callback's metrics.
    """

    gathered_names: Sequence[str] = ()
    columns: ClassVar[Sequence[ProgressColumn]] = ()
    summary: ClassVar[Mapping[str, SummaryField]] = {}

    def on_train_begin(self, completed_steps: int) -> None:
        """Prepare to train after `completed_steps` steps of an earlier start. May be collective."""

    def on_step_begin(self, step: Step) -> None:
        """Prepare for a step, before its first microbatch."""

    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        """Record a microbatch of this rank."""

    def local_values(self) -> Sequence[float]:
        """Return this rank's values for the all-gather, one for each of `gathered_names`."""
        return ()

    def on_gathered(self, step: Step, gathered: "sharded.MinibatchStats") -> None:
        """Use the values of all ranks, before the optimizer step. The outcome must be the same on every rank."""

    def on_step_end(self, step: Step) -> None:
        """Run between two steps: parameters are published and metrics complete. May be collective."""

    def on_train_end(self) -> Mapping[str, Any]:
        """Finish the run and return entries of ``summary.json``. May be collective."""
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state on which the next step depends, for checkpoints; JSON-serializable."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state from the merged `state_dict` of all callbacks, or raise a UserError if it does not fit."""

    def close(self) -> None:
        """Release resources. Called however the run ends."""

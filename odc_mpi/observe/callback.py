"""What takes part in a step of a run: told of each stage of it, and heard at point A. Nothing here imports torch.

    start              before the first step
    begin              before the first microbatch
    after_microbatch   after each of this rank's
    tell               before A: this rank's numbers
    hear               after A, before the optimizer: the numbers of all ranks
    after_step         after B: also what takes communication of its own, as a save or an evaluation may
    finish             after the last step

All of it is local but for `start`, `on_step_end` and `on_train_end`, which may be collective.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from odc_mpi.observe.metrics import ProgressColumn, SummaryField

if TYPE_CHECKING:
    from odc_mpi.data.loader import Microbatch, Minibatch
    from odc_mpi.shard import model as sharded

#: Bits of a number that is to be added up, below the magnitude that it is told to have at most.
_EXACT_SUM_BITS = 44


def round_for_exact_sum(value: float, max_magnitude: float) -> float:
    """Round a number so that a sum of such numbers is exact, and does not depend on its order.

    Args:
        value: The number; one that is not finite stays what it is.
        max_magnitude: The same for all numbers of a sum, above 0. Sums are exact below 2**8 times it, and numbers are rounded to
            2**-44 of it or less.
    """
    unit = 2.0 ** (math.frexp(max_magnitude)[1] - 1 - _EXACT_SUM_BITS)
    return round(value / unit) * unit if math.isfinite(value) else value


@dataclass
class Step:
    """One step of a run.

    Attributes:
        number: Counted from 1.
        minibatch: Over all ranks.
        metrics: A line of ``metrics.jsonl``, to which every participant adds what it reports: the same on every rank,
            but for what depends on this rank's clock.
    """

    number: int
    minibatch: "Minibatch"
    metrics: dict[str, Any]


class MicrobatchResult(NamedTuple):
    """A microbatch that this rank has run.

    Attributes:
        loss: Its part of the objective.
        began: In seconds of `time.perf_counter`.
        ended: As `began`.
        busy_s: Seconds of this rank's own work: fetches and pushes included, waits for slower ranks not.
    """

    microbatch: "Microbatch"
    loss: float
    began: float
    ended: float
    busy_s: float


class Callback:
    """Takes part in every step; each method does nothing unless a subclass has something to do.

    Attributes:
        gathered_names: Of the numbers that this participant tells at point A, the same on every rank, unlike any other's.
        columns: Of the terminal's line per step.
        summary: Entries of ``summary.json`` that are made from this participant's metrics.
    """

    gathered_names: Sequence[str] = ()
    columns: ClassVar[Sequence[ProgressColumn]] = ()
    summary: ClassVar[Mapping[str, SummaryField]] = {}

    def on_train_begin(self, completed_steps: int) -> None:
        """Prepare for the steps to come, after `done` steps of a run before. Collective, if need be."""

    def on_step_begin(self, step: Step) -> None:
        """Prepare for a step."""

    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        """Take note of a microbatch of this rank."""

    def local_values(self) -> Sequence[float]:
        """Return this rank's numbers, one for each of `names`."""
        return ()

    def on_gathered(self, step: Step, gathered: "sharded.MinibatchStats") -> None:
        """Take what all ranks told. Local, after A and before the optimizer's step; the same outcome on every rank."""

    def on_step_end(self, step: Step) -> None:
        """Do what is due between two steps: parameters are published, the metrics complete. Collective, if need be."""

    def on_train_end(self) -> Mapping[str, Any]:
        """End, and return entries of ``summary.json``. Collective, if need be."""
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state on which the next step depends, for checkpoints, as JSON takes it."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where the `state_dict` of all participants was taken.

        Raises:
            UserError: The state does not fit the run.
        """

    def close(self) -> None:
        """Close what is open, however the run ends."""

"""Watch on the gradients that each rank pushes, for faults such as a flipped bit or a library that differs on one host.

For each unit, a rank compares the largest element of its pushed gradients, per token, with an exponential moving
average of earlier minibatches. With the all-gather that completes the gradients, it reports its most deviating unit. An
element that loses a bit of its exponent is a thousand times or more the largest one, but hardly changes the norm of a
large unit. A bit that makes an element smaller is not found. This is no protection against a malicious rank.
"""

import math
from typing import Any

import numpy as np
from typing_extensions import override

from odc_mpi.errors import warn
from odc_mpi.islands.norms import WARM_UP, UsualNorm
from odc_mpi.observe.callback import Callback, MicrobatchResult, Step
from odc_mpi.observe.metrics import RESULT, Metric
from odc_mpi.runtime.world import World
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.shard.model import ShardedModel


class PushWatch(Callback):
    """Warns of a rank whose gradients are far larger than its usual ones, by rank, host and unit. Never ends the run.

    Gradients that are not finite skip the step, and `training.nonfinite` reports their rank.

    Its `local_values` complete this rank's pushes, so those of later callbacks must not run the model. A resumed run
    starts with new averages, and compares from the 11th minibatch on.

    Args:
        limit: Factor above which a rank is named (`run.norm_watch`).
    """

    gathered_names = ("push_unit", "push_deviation")
    metrics = (
        Metric("push_deviation", "largest gradient element per token of a rank's unit, as a multiple of its usual one"),
        Metric("push_warnings", "warnings of deviating gradients", RESULT, "end"),
    )

    def __init__(self, world: World, model: ShardedModel, limit: float) -> None:
        self._world, self._model, self._limit = world, model, limit
        self._names = [unit.name for unit in model.units]
        self._usual = {name: UsualNorm() for name in self._names}
        self._num_tokens = self._num_warnings = 0

    @override
    def on_step_begin(self, step: Step) -> None:
        self._num_tokens = 0

    @override
    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        self._num_tokens += result.microbatch.num_input_tokens

    @override
    def local_values(self) -> tuple[float, float]:
        """Return the number of the most deviating unit, in the order of the model's units, and its factor."""
        largest = self._model.largest_pushed()
        factors = {name: self._compare(name, value / max(1, self._num_tokens)) for name, value in largest.items()}
        name = max(factors, key=factors.__getitem__, default=self._names[0])
        return float(self._names.index(name)), factors.get(name, 0.0)

    @override
    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        factors = gathered.per_rank("push_deviation")
        step.metrics["push_deviation"] = float(factors.max())
        for rank in np.flatnonzero((factors > self._limit) & np.isfinite(factors)).tolist():
            self._num_warnings += 1
            if self._world.rank == 0:
                name = self._names[int(gathered.per_rank("push_unit")[rank])]
                warn(f"WARNING: step {step.number}: {self._describe(rank, name, float(factors[rank]))}")

    @override
    def on_train_end(self) -> dict[str, Any]:
        return {"push_warnings": self._num_warnings}

    def _compare(self, name: str, norm: float) -> float:
        """Return the factor of a unit, or 0 in the first minibatches, and let the norm enter the mean."""
        usual = self._usual[name]
        factor, is_warm = usual.factor(norm), usual.count >= WARM_UP
        if math.isfinite(norm) and norm > 0.0:
            # Bounded, so that one fault does not hide the next, and lasting changes become usual after a few.
            usual.add(min(norm, self._limit * usual.mean) if usual.count else norm)
        return factor if is_warm or math.isinf(factor) else 0.0

    def _describe(self, rank: int, name: str, factor: float) -> str:
        return (
            f"rank {rank} on {self._world.hosts[rank]} pushed a gradient of unit {name or '(root)'} whose largest "
            f"element per token is {factor:.3g} times the usual (run.norm_watch {self._limit:g}): if this repeats, "
            "check that host's memory"
        )

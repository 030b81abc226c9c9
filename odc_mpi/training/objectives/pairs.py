"""Base class of objectives that are means over pairs of answers."""

from abc import abstractmethod

import torch

from odc_mpi.data.loader import Minibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.observe.callback import MicrobatchResult, Step, round_for_exact_sum
from odc_mpi.shard import model as sharded
from odc_mpi.training.loop import Objective

#: Bound for `round_for_exact_sum`: sums are exact while they are below 2**8 times this number.
_MAX_SUMMAND = 2.0**16


class PairObjective(Objective):
    """Objective that sums the loss and statistics of the pairs of a minibatch.

    The sums do not depend on the order of the microbatches, nor on their distribution over ranks.

    Attributes:
        summed_names: Names of the sums, beginning with `loss`.
    """

    summed_names: tuple[str, ...]

    @abstractmethod
    def loss_and_statistics(self, minibatch: Minibatch, microbatch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the contributions of a microbatch to the loss and to the other sums, `[len(summed_names) - 1]`.

        The latter are float64 without gradients. One-sided.
        """

    def on_step_begin(self, step: Step) -> None:
        """Set all sums of the step to 0."""
        self._sums = dict.fromkeys(self.summed_names, 0.0)

    def loss(self, model: sharded.ShardedModel, minibatch: Minibatch, microbatch: Microbatch) -> torch.Tensor:
        """Return the contribution of a microbatch to the mean loss of the minibatch. One-sided."""
        # Statistics are read after the backward, since a GPU has not computed them yet.
        loss, self._last_statistics = self.loss_and_statistics(minibatch, microbatch)
        return loss

    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        """Add the loss and the statistics of a microbatch to the sums of the step."""
        for name, value in zip(self.summed_names, (result.loss, *self._last_statistics.tolist()), strict=True):
            self._sums[name] += round_for_exact_sum(value, _MAX_SUMMAND)

    def local_values(self) -> tuple[float, ...]:
        """Return the sums of this rank's microbatches in the order of `summed_names`."""
        return tuple(self._sums.values())

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Add the sums over all ranks and the number of loss tokens to the metrics of the step."""
        sums = {name: gathered.sum(name) for name in self.summed_names}
        step.metrics |= {**sums, "num_tokens": step.minibatch.num_tokens}

"""Base classes for objectives that average a loss over pairs of answers, and for scorers that compute the losses."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch

from odc_mpi.data.loader import Minibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.observe.callback import MicrobatchResult, Step, round_for_exact_sum
from odc_mpi.observe.metrics import ProgressColumn
from odc_mpi.shard import model as sharded
from odc_mpi.training.loop import Objective

#: Bound for `round_for_exact_sum`: sums are exact as long as they are below 2**8 times this number.
_MAX_SUMMAND = 2.0**16
#: Statistics reduced to their minimum or maximum over all pairs, each with the function for numbers, the initial value
#: and the function for tensors. Other statistics are averaged.
EXTREMES = {"min_reward": (min, math.inf, torch.amin), "max_reward": (max, -math.inf, torch.amax)}


class PairScores(NamedTuple):
    """Scores of the pairs in a microbatch.

    Attributes:
        losses: Loss of each pair, float64 `[pairs]`, with gradients.
        statistics: Statistics of each pair, float64 `[pairs, len(PairScorer.statistics)]`, without gradients.
        token_sums: Sums over all loss tokens, float64 `[len(PairScorer.token_sums)]`, or None if the scorer has none.
        router_loss: Auxiliary router loss, or None, as in `TokenScores`.
    """

    losses: torch.Tensor
    statistics: torch.Tensor
    token_sums: torch.Tensor | None = None
    router_loss: torch.Tensor | None = None


class PairScorer(ABC):
    """Base class for callables that compute the losses of pairs under a model.

    Attributes:
        statistics: Names of the statistics of each pair.
        token_sums: Names of the sums over loss tokens. Training reports them divided by the number of loss tokens.
    """

    statistics: tuple[str, ...]
    token_sums: tuple[str, ...] = ()

    @abstractmethod
    def __call__(self, minibatch: Minibatch, microbatch: Microbatch) -> PairScores:
        """Score the pairs in one microbatch of `minibatch`. All tensors are on the model's device. One-sided."""

    def derived_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return additional metrics, derived from `metrics`, which maps each statistic to its mean or extreme."""
        return {}


class PairObjective(Objective):
    """Mean of a scorer's losses over all pairs in a minibatch, plus the auxiliary router loss, if any.

    The metrics do not depend on the order of the microbatches or on their assignment to ranks.
    """

    def __init_subclass__(cls, margin: str, accuracy: str) -> None:
        """Show the metrics that `margin` and `accuracy` name in the progress line."""
        cls.columns = (
            *Objective.columns,
            ProgressColumn("margin", 8, f"{{{margin}:.4f}}"),
            ProgressColumn("accuracy", 8, f"{{{accuracy}:.1%}}"),
        )

    def __init__(self, scorer: PairScorer) -> None:
        self._scorer = scorer
        self.gathered_names = ("loss", *scorer.token_sums, *scorer.statistics)

    def on_step_begin(self, step: Step) -> None:
        """Reset all sums, minima and maxima for this step."""
        self._values = {name: EXTREMES[name][1] if name in EXTREMES else 0.0 for name in self.gathered_names}

    def loss(self, model: sharded.ShardedModel, minibatch: Minibatch, microbatch: Microbatch) -> torch.Tensor:
        """Return the contribution of a microbatch to the mean loss of the minibatch. One-sided."""
        scores, num_pairs = self._scorer(minibatch, microbatch), len(minibatch.indices)
        loss = scores.losses.sum() / num_pairs
        if scores.router_loss is not None:
            loss = loss + scores.router_loss * (microbatch.num_tokens / minibatch.num_tokens)
        columns = zip(self._scorer.statistics, scores.statistics.unbind(1), strict=True)
        self.statistics = torch.stack(
            [EXTREMES[name][2](x, 0) if name in EXTREMES else x.sum() / num_pairs for name, x in columns]
        )
        if scores.token_sums is not None:
            self.statistics = torch.cat([scores.token_sums / minibatch.num_tokens, self.statistics])
        return loss

    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        """Include the loss and the statistics of a microbatch in the sums, minima and maxima of the step."""
        for name, value in zip(self.gathered_names, (result.loss, *result.statistics), strict=True):
            if name in EXTREMES:
                self._values[name] = EXTREMES[name][0](self._values[name], value)
            else:
                self._values[name] += round_for_exact_sum(value, _MAX_SUMMAND)

    def local_values(self) -> tuple[float, ...]:
        """Return the sums, minima and maxima of this rank, in the order of `gathered_names`."""
        return tuple(self._values.values())

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Add metrics over the pairs of all ranks to the step, named as in TRL."""
        metrics = {
            name: EXTREMES[name][0](gathered.per_rank(name).tolist()) if name in EXTREMES else gathered.sum(name)
            for name in self.gathered_names
        }
        step.metrics |= {**metrics, "num_tokens": step.minibatch.num_tokens, **self._scorer.derived_metrics(metrics)}

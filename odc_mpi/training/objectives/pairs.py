"""Base classes for objectives that average a loss over pairs of answers, and for scorers that compute the losses."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from odc_mpi.data.loader import Minibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.observe.callback import Step
from odc_mpi.observe.metrics import ProgressColumn
from odc_mpi.shard import model as sharded
from odc_mpi.training.loop import Objective

#: Statistics reduced to their minimum or maximum over all pairs. Other statistics are averaged.
EXTREMES = {"min_reward": min, "max_reward": max}


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

    `statistics` are the names of the statistics of each pair, and `token_sums` those of the sums over loss tokens.
    `margin` and `accuracy` are the names of the two statistics in the progress line.
    """

    statistics: tuple[str, ...]
    margin: str
    accuracy: str
    token_sums: tuple[str, ...] = ()

    @abstractmethod
    def __call__(self, minibatch: Minibatch, microbatch: Microbatch) -> PairScores:
        """Score the pairs in one microbatch of `minibatch`. All tensors are on the model's device. One-sided."""


class PairObjective(Objective):
    """Mean of a scorer's losses over all pairs in a minibatch, plus the auxiliary router loss, if any."""

    extremes = EXTREMES

    def __init__(self, scorer: PairScorer) -> None:
        self._scorer = scorer
        self.gathered_names = ("loss", *scorer.token_sums, *scorer.statistics)
        self.columns = (  # type: ignore[misc]  # not a class variable here, since it depends on the scorer
            *self.columns,
            ProgressColumn("margin", 8, f"{{{scorer.margin}:.4f}}"),
            ProgressColumn("accuracy", 8, f"{{{scorer.accuracy}:.1%}}"),
        )

    def loss(self, minibatch: Minibatch, microbatch: Microbatch) -> torch.Tensor:
        """Return the contribution of a microbatch to the mean loss of the minibatch. One-sided."""
        scores, num_pairs = self._scorer(minibatch, microbatch), len(minibatch.indices)
        loss = scores.losses.sum() / num_pairs
        if scores.router_loss is not None:
            loss = loss + scores.router_loss * (microbatch.num_tokens / minibatch.num_tokens)
        tensors = {min: torch.amin, max: torch.amax}
        columns = zip(self._scorer.statistics, scores.statistics.unbind(1), strict=True)
        self.statistics = torch.stack(
            [tensors[EXTREMES[name]](x, 0) if name in EXTREMES else x.sum() / num_pairs for name, x in columns]
        )
        if scores.token_sums is not None:
            self.statistics = torch.cat([scores.token_sums / minibatch.num_tokens, self.statistics])
        return loss

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Add metrics over the pairs of all ranks to the step, named as in TRL."""
        step.metrics |= {**self.reduce(gathered), "num_tokens": step.minibatch.num_tokens}

"""Training and evaluation on pairs of answers. Recipes define the loss as a `PairScorer`."""

from abc import ABC, abstractmethod
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import torch

from odc_mpi.data.loader import PlannedMinibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.observe.callback import Step
from odc_mpi.observe.metrics import RESULT, Metric
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.evaluation import ForwardPass, HeldOutEvaluator
from odc_mpi.training.loop import Objective
from odc_mpi.training.settings import RunConfig

#: Statistics that are reduced to their minimum or maximum over all pairs. Other statistics are averaged.
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

    `statistics` contains the names of the statistics for each pair, and `token_sums` those of the sums over loss
    tokens. `metrics` declares both.
    """

    statistics: tuple[str, ...]
    metrics: tuple[Metric, ...]
    token_sums: tuple[str, ...] = ()

    @abstractmethod
    def __call__(self, minibatch: PlannedMinibatch, microbatch: Microbatch) -> PairScores:
        """Score the pairs in one microbatch of `minibatch`. All tensors are on the model's device. One-sided."""


class PairObjective(Objective):
    """Mean of a scorer's losses over all pairs in a minibatch, plus the auxiliary router loss, if any."""

    extremes = EXTREMES

    def __init__(self, scorer: PairScorer) -> None:
        self._scorer = scorer
        self.gathered_names = ("loss", *scorer.token_sums, *scorer.statistics)
        self.metrics = (*self.metrics, *scorer.metrics)

    def loss(self, minibatch: PlannedMinibatch, microbatch: Microbatch) -> torch.Tensor:
        """Return a microbatch's contribution to the mean loss of the minibatch. One-sided."""
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

    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        """Add metrics for the pairs of all ranks to the step. Their names are those used in TRL."""
        step.metrics |= {**self.reduce(gathered), "num_tokens": step.minibatch.num_tokens}


class PairEvaluator(HeldOutEvaluator[PairScorer]):
    """Reports a `PairScorer`'s loss and statistics on held-out pairs. Their names have the prefix `eval_`."""

    metrics = (*HeldOutEvaluator.metrics, Metric("eval_NAME", "held-out mean of the metric NAME of pairs", RESULT))

    def __init__(self, run: RunConfig, model: ShardedModel, forward_pass: ForwardPass, scorer: PairScorer) -> None:
        super().__init__(run, model, forward_pass, scorer)
        self.metrics = (
            *HeldOutEvaluator.metrics,
            *(held_out_metric(each) for each in scorer.metrics if each.key in scorer.statistics),
        )

    def evaluate(self) -> dict[str, float]:
        """Return the loss and the statistics over the held-out pairs. Collective."""
        columns = self._forward_pass.columns(self._minibatch, self._score)
        names = ("loss", *self._scorer.statistics)
        return {f"eval_{name}": EXTREMES.get(name, fmean)(column) for name, column in zip(names, columns, strict=True)}

    def _score(self, microbatch: Microbatch) -> torch.Tensor:
        scores = self._scorer(self._minibatch, microbatch)
        return torch.cat([scores.losses[:, None], scores.statistics], 1)


def held_out_metric(metric: Metric) -> Metric:
    """Return the declaration for held-out pairs. That of the accuracy, which `odc-mpi watch` shows, is summarized."""
    held_out = replace(metric, key=f"eval_{metric.key}", label=f"held-out {metric.label}", column=None)
    shown = replace(held_out, summary="start final", summary_key="eval_accuracy", row="eval accuracy")
    return replace(shown, column=("eval acc", 8)) if "watch" in metric.views else held_out

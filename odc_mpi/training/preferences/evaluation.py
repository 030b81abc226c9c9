"""Evaluation on held-out pairs of answers."""

from dataclasses import replace
from statistics import fmean

import torch

from odc_mpi.data.microbatch import Microbatch
from odc_mpi.observe.metrics import RESULT, Metric
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.evaluation import ForwardPass, HeldOutEvaluator
from odc_mpi.training.preferences.pairs import EXTREMES, PairScorer
from odc_mpi.training.settings import RunConfig


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
        rows = sorted(row for rows in self._forward_pass.run(self._minibatch, self._score) for row in rows)
        # In the order of the pairs, whichever rank computed which pair.
        _, *columns = zip(*rows, strict=True)
        names = ("loss", *self._scorer.statistics)
        return {f"eval_{name}": EXTREMES.get(name, fmean)(column) for name, column in zip(names, columns, strict=True)}

    def _score(self, microbatch: Microbatch) -> list[list[float]]:
        """Return the index, the loss and the statistics of each pair."""
        scores = self._scorer(self._minibatch, microbatch)
        values = torch.cat([scores.losses[:, None], scores.statistics], 1).tolist()
        return [[index, *row] for index, row in zip(microbatch.indices.tolist(), values, strict=True)]


def held_out_metric(metric: Metric) -> Metric:
    """Return the declaration for held-out pairs. That of the accuracy, which `odc-mpi watch` shows, is summarized."""
    held_out = replace(metric, key=f"eval_{metric.key}", label=f"held-out {metric.label}", column=None)
    shown = replace(held_out, summary="start final", summary_key="eval_accuracy", row="eval accuracy")
    return replace(shown, column=("eval acc", 8)) if "watch" in metric.views else held_out

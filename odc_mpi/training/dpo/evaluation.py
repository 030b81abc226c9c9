"""Evaluation of preferences on held-out pairs."""

import math
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from odc_mpi.data.microbatch import Microbatch
from odc_mpi.observe.metrics import ProgressColumn, SummaryField
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.dpo.reference import ReferenceLogps
from odc_mpi.training.dpo.settings import DPOConfig
from odc_mpi.training.evaluation import ForwardPass, PeriodicEvaluator
from odc_mpi.training.objectives.dpo import AnswerLogps
from odc_mpi.training.objectives.pair_losses import STATISTICS, PairLogps, pair_loss, pair_statistics
from odc_mpi.training.settings import RunConfig


class PreferenceEvaluator(PeriodicEvaluator):
    """Computes the loss, rewards and accuracy of the held-out pairs with these indices, int64 `[n]`."""

    columns: ClassVar = (
        ProgressColumn("eval", 8, lambda line: f"{line['eval_loss']:.4f}"),
        ProgressColumn("eval acc", 8, lambda line: f"{line['eval_rewards/accuracies']:.1%}"),
    )
    summary: ClassVar = {
        "eval_loss_start": SummaryField("eval_loss", "start"),
        "eval_loss": SummaryField("eval_loss", "last"),
        "eval_loss_best": SummaryField("eval_loss", "min"),
        "eval_accuracy_start": SummaryField("eval_rewards/accuracies", "start"),
        "eval_accuracy": SummaryField("eval_rewards/accuracies", "last"),
        "eval_s": SummaryField("eval_s", "sum"),
    }

    def __init__(
        self,
        run: RunConfig,
        model: ShardedModel,
        forward_pass: ForwardPass,
        indices: npt.NDArray[np.int64],
        answer_logps: AnswerLogps,
        dpo: DPOConfig,
        reference: ReferenceLogps,
    ) -> None:
        super().__init__(run, model)
        self._answer_logps, self._dpo, self._reference = answer_logps, dpo, reference
        self._forward_pass, self._minibatch = forward_pass, forward_pass.plan(indices)
        counts = forward_pass.dataset.pair_counts
        assert counts is not None
        self._mean_chosen_length = float(counts[indices, 2].mean())

    def evaluate(self) -> dict[str, float]:
        """Return means over the pairs under the names of training with the prefix `eval_`. Collective."""
        rows = sorted(row for rows in self._forward_pass.run(self._minibatch, self._score) for row in rows)
        # Added in the order of the pairs, and rounded once, whichever rank computed which pair.
        means = [math.fsum(column) / len(rows) for column in list(zip(*rows, strict=True))[1:]]
        metrics = {f"eval_{name}": mean for name, mean in zip(("loss", *STATISTICS), means, strict=True)}
        metrics["eval_rewards/margins"] = metrics["eval_rewards/chosen"] - metrics["eval_rewards/rejected"]
        return metrics

    def _score(self, microbatch: Microbatch) -> list[list[float]]:
        """Return index, loss and statistics of each pair."""
        scores = self._answer_logps(microbatch)
        reference = self._reference.evaluation[microbatch.indices].to(scores.logps.device)
        pairs = PairLogps(scores.logps, reference, scores.lengths, self._mean_chosen_length)
        values = torch.cat([pair_loss(self._dpo, pairs)[:, None], pair_statistics(self._dpo, pairs)], 1).tolist()
        return [[index, *row] for index, row in zip(microbatch.indices.tolist(), values, strict=True)]

    def close(self) -> None:
        """Close the held-out data set."""
        self._forward_pass.dataset.close()

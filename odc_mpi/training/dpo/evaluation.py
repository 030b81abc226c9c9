"""Evaluation of preferences on held-out pairs."""

from statistics import fmean
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from odc_mpi.data.microbatch import Microbatch
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.dpo.reference import ReferenceLogps
from odc_mpi.training.dpo.settings import DPOConfig
from odc_mpi.training.evaluation import ForwardPass, PairEvaluator
from odc_mpi.training.objectives.dpo import AnswerLogps
from odc_mpi.training.objectives.pair_losses import STATISTICS, PairLogps, pair_loss, pair_statistics
from odc_mpi.training.settings import RunConfig


class PreferenceEvaluator(PairEvaluator, accuracy="eval_rewards/accuracies"):
    """Computes the loss, rewards and accuracy of the held-out pairs with these indices, int64 `[n]`."""

    reductions: ClassVar = dict.fromkeys(("loss", *STATISTICS), fmean)

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
        super().__init__(run, model, forward_pass, indices)
        self._answer_logps, self._dpo, self._reference = answer_logps, dpo, reference
        counts = forward_pass.dataset.pair_counts
        assert counts is not None
        self._mean_chosen_length = float(counts[indices, 2].mean())

    def evaluate(self) -> dict[str, float]:
        """Return means over the pairs under the names of training with the prefix `eval_`. Collective."""
        metrics = super().evaluate()
        metrics["eval_rewards/margins"] = metrics["eval_rewards/chosen"] - metrics["eval_rewards/rejected"]
        return metrics

    def score(self, microbatch: Microbatch) -> torch.Tensor:
        """Return the loss and the statistics of each pair."""
        scores = self._answer_logps(microbatch)
        reference = self._reference.evaluation[microbatch.indices].to(scores.logps.device)
        pairs = PairLogps(scores.logps, reference, scores.lengths, self._mean_chosen_length)
        return torch.cat([pair_loss(self._dpo, pairs)[:, None], pair_statistics(self._dpo, pairs)], 1)

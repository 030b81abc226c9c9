"""Kahneman-Tversky optimization (KTO, arXiv 2402.01306): losses of answers that are desirable or not.

r is the log-ratio of an answer: its log-probability under the model minus that under the reference model. s is the
logistic function, and z the estimate of the KL divergence in `kto.kl`, or 0 with `apo_zero_unpaired` (arXiv
2408.06266).

    desirable      1 - s(beta (r - z))    times desirable_weight
    undesirable    1 - s(beta (z - r))    times undesirable_weight

The loss of a minibatch is the mean over its answers. Names and definitions are those of `KTOTrainer` in TRL 1.16.
"""

from collections.abc import Mapping
from typing import cast

import torch
from typing_extensions import override

from odc_mpi.data.groups import GroupMicrobatch
from odc_mpi.data.loader import PlannedMinibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.observe.callback import Step
from odc_mpi.observe.metrics import RESULT, Metric
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.evaluation import ForwardPass, HeldOutEvaluator
from odc_mpi.training.loop import Objective
from odc_mpi.training.preferences.answer_logps import ANSWER_METRICS, AnswerLogps, AnswerScores
from odc_mpi.training.preferences.pairs import held_out_metric
from odc_mpi.training.recipes.kto import KTOConfig
from odc_mpi.training.recipes.kto.kl import KLEstimator
from odc_mpi.training.settings import Config

_KL = Metric("kl", "KL divergence from the reference, with `rl.beta` or KTO, or from a teacher", RESULT)


class KTOScorer:
    """Computes log-probabilities of answers under the model and under the reference model."""

    def __init__(self, policy: AnswerLogps, reference: AnswerLogps) -> None:
        self._policy, self._reference = policy, reference

    def score(self, microbatch: Microbatch) -> tuple[AnswerScores, torch.Tensor]:
        """Return the model's scores of n prompts with one answer each, and the log-ratios, float64 `[n]`. One-sided.

        Both have gradients, unless they are disabled.
        """
        scores = self._policy(microbatch)
        with torch.no_grad():
            reference = self._reference(microbatch).logps
        return scores, (scores.logps - reference)[:, 0]

    def __call__(self, microbatch: Microbatch) -> torch.Tensor:
        """Return the log-ratio of each answer, float64 `[n]`. One-sided."""
        return self.score(microbatch)[1]


def kto_losses(kto: KTOConfig, ratios: torch.Tensor, is_desirable: torch.Tensor, kl: float) -> torch.Tensor:
    """Return the weighted loss of each answer, `[n]`, from its log-ratio, `[n]`, and whether it is desirable, `[n]`."""
    signs = torch.where(is_desirable, 1.0, -1.0)
    weights = torch.where(is_desirable, kto.desirable_weight, kto.undesirable_weight)
    return weights * (1 - torch.sigmoid(kto.beta * signs * (ratios - kl)))


def answer_metrics(
    kto: KTOConfig, sums: Mapping[bool, tuple[float, float]], counts: Mapping[bool, int]
) -> dict[str, float]:
    """Return the mean reward and log-probability of each kind of answers, and the margin, keyed by name of the metric.

    The reward is `kto.beta` times the log-ratio. The kinds are desirable (True) and undesirable answers. `sums` are
    those of the log-ratios and log-probabilities. A kind without answers has no metrics, nor a margin.
    """
    metrics = {}
    for kind, name in ((True, "chosen"), (False, "rejected")):
        if counts[kind]:
            metrics[f"rewards/{name}"] = kto.beta * sums[kind][0] / counts[kind]
            metrics[f"logps/{name}"] = sums[kind][1] / counts[kind]
    if all(counts.values()):
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return metrics


class KTOObjective(Objective):
    """Mean of the losses of all answers in a minibatch, plus the auxiliary router loss, if any.

    `kl` estimates the KL divergence; None if the loss does not depend on it.
    """

    metrics = (*Objective.metrics, *ANSWER_METRICS, _KL)
    gathered_names = ("loss", "entropy", "kto_ratio_1", "kto_logps_1", "kto_ratio_0", "kto_logps_0")

    def __init__(self, kto: KTOConfig, scorer: KTOScorer, kl: KLEstimator | None) -> None:
        self._kto, self._scorer, self._estimator = kto, scorer, kl
        self._kl = 0.0

    @override
    def on_step_begin(self, step: Step) -> None:
        """Estimate the KL divergence. Collective, unless the loss does not depend on it."""
        super().on_step_begin(step)
        self._kl = self._estimator.estimate(step.minibatch) if self._estimator else 0.0

    def loss(self, minibatch: PlannedMinibatch, microbatch: Microbatch) -> torch.Tensor:
        """Return a microbatch's contribution to the mean loss of the minibatch. One-sided."""
        scores, ratios = self._scorer.score(microbatch)
        is_desirable = cast(GroupMicrobatch, microbatch).columns["label"]
        loss = kto_losses(self._kto, ratios, is_desirable, self._kl).sum() / len(minibatch.indices)
        if scores.router_loss is not None:
            loss = loss + scores.router_loss * (microbatch.num_tokens / minibatch.num_tokens)
        values = torch.stack([ratios, scores.logps[:, 0]]).detach()
        sums = [(values * kind).sum(1) for kind in (is_desirable, ~is_desirable)]
        self.statistics = torch.cat([scores.entropy.double()[None] / minibatch.num_tokens, *sums])
        return loss

    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        """Add metrics for the answers of all ranks to the step. Their names are those used in TRL."""
        loss, entropy, *sums = self.reduce(gathered).values()
        labels = step.minibatch.dataset.columns["label"][step.minibatch.indices]
        num_desirable = int(labels.sum())
        step.metrics |= {
            "loss": loss,
            "entropy": entropy,
            "num_tokens": step.minibatch.num_tokens,
            **({"kl": self._kl} if self._estimator else {}),
            **answer_metrics(
                self._kto,
                {True: (sums[0], sums[1]), False: (sums[2], sums[3])},
                {True: num_desirable, False: len(labels) - num_desirable},
            ),
        }


class KTOEvaluator(HeldOutEvaluator[KTOScorer]):
    """Reports the loss and the metrics of `KTOObjective` on held-out answers. Their names have the prefix `eval_`."""

    metrics = (
        *HeldOutEvaluator.metrics,
        Metric("eval_NAME", "held-out value of the metric NAME of answers with labels", RESULT),
    )

    def __init__(
        self, config: Config, model: ShardedModel, forward_pass: ForwardPass, scorer: KTOScorer, kl: KLEstimator | None
    ) -> None:
        super().__init__(config.run, model, forward_pass, scorer)
        self._kto, self._estimator = config.kto, kl
        self.metrics = (*HeldOutEvaluator.metrics, *map(held_out_metric, (*ANSWER_METRICS, _KL)))

    def evaluate(self) -> dict[str, float]:
        """Return the loss and the metrics over the held-out answers. Collective."""
        kl = self._estimator.estimate(self._minibatch) if self._estimator else 0.0
        columns = self._forward_pass.columns(self._minibatch, self._score)
        labels, ratios, logps = torch.tensor(columns, dtype=torch.float64)
        is_desirable = labels == 1
        metrics = {"loss": float(kto_losses(self._kto, ratios, is_desirable, kl).mean())}
        if self._estimator:
            metrics["kl"] = kl
        kinds = {True: is_desirable, False: ~is_desirable}
        sums = {kind: (float(ratios[mask].sum()), float(logps[mask].sum())) for kind, mask in kinds.items()}
        metrics |= answer_metrics(self._kto, sums, {kind: int(mask.sum()) for kind, mask in kinds.items()})
        return {f"eval_{name}": value for name, value in metrics.items()}

    def _score(self, microbatch: Microbatch) -> torch.Tensor:
        """Return the label, the log-ratio and the log-probability of each answer."""
        scores, ratios = self._scorer.score(microbatch)
        is_desirable = cast(GroupMicrobatch, microbatch).columns["label"]
        return torch.stack([is_desirable.double(), ratios, scores.logps[:, 0]], 1)

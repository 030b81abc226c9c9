"""Direct preference optimization (DPO) and related losses for a pair of a chosen and a rejected answer.

r is the log-ratio of an answer: its log-probability under the model minus that under the reference model. m is the mean
of r over the loss tokens of the answer, s the logistic function, and e the label smoothing.

    sigmoid        -(1 - e) log s(d) - e log s(-d), d = beta (r_chosen - r_rejected)    DPO, arXiv 2305.18290
    robust         (-(1 - e) log s(d) + e log s(-d)) / (1 - 2 e)                        arXiv 2403.00409
    hinge          max(0, 1 - d)                                                        SLiC, arXiv 2305.10425
    ipo            (m_chosen - m_rejected - 1 / (2 beta))²                              arXiv 2310.12036
    sigmoid_norm   -log s(beta (m_chosen - m_rejected))                                 arXiv 2411.15124
    apo_zero       1 - s(beta r_chosen) + s(beta r_rejected)                            arXiv 2408.06266
    apo_down       s(beta r_chosen) + 1 - s(d)                                          arXiv 2408.06266
    sft            cross entropy of the chosen answers, mean over their tokens in the minibatch

Names and definitions are those of `DPOTrainer` in TRL 1.16, except that TRL ignores e in `sigmoid`.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import logsigmoid
from typing_extensions import override

from odc_mpi.data.loader import PlannedMinibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.observe.metrics import RESULT, Metric
from odc_mpi.training.preferences.answer_logps import ANSWER_METRICS, AnswerLogps, AnswerScores
from odc_mpi.training.preferences.pairs import PairScorer, PairScores
from odc_mpi.training.recipes.dpo import DPOConfig


class PreferenceScorer(PairScorer):
    """Computes the DPO loss of each pair and the rewards of its answers. The statistics are named as in TRL.

    `reference`, float64 `[pairs, 2]` on the host, contains the reference model's log-probabilities of the answers in
    all pairs of the data set. The values may be filled in at any time before the first call.
    """

    statistics = (
        *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
        *("logps/chosen", "logps/rejected"),
    )
    metrics = (
        *ANSWER_METRICS,
        Metric("rewards/accuracies", "accuracy", RESULT, "", "{:.1%}", ("accuracy", 8), views="watch"),
    )
    token_sums = ("entropy",)

    def __init__(self, answer_logps: AnswerLogps, dpo: DPOConfig, reference: torch.Tensor) -> None:
        self._answer_logps, self._dpo, self._reference = answer_logps, dpo, reference

    @override
    def __call__(self, minibatch: PlannedMinibatch, microbatch: Microbatch) -> PairScores:
        scores = self._answer_logps(microbatch)
        reference = self._reference[microbatch.indices].to(scores.logps.device, non_blocking=True)
        ratios = scores.logps - reference
        num_chosen = minibatch.dataset.columns["num_chosen_loss_tokens"]
        losses = pair_loss(self._dpo, ratios, scores, float(num_chosen[minibatch.indices].mean()))
        statistics = pair_statistics(self._dpo, ratios.detach(), scores.logps.detach())
        return PairScores(losses, statistics, scores.entropy.double()[None], scores.router_loss)


def pair_loss(dpo: DPOConfig, ratios: torch.Tensor, scores: AnswerScores, mean_chosen_length: float) -> torch.Tensor:
    """Return each pair's weighted sum of the losses in `dpo.loss_type`, float64 `[pairs]`.

    `ratios`, float64 `[pairs, 2]`, contains the answers' log-ratios. `mean_chosen_length` is the mean number of loss
    tokens in the chosen answers of the minibatch.
    """
    means = ratios / scores.lengths
    mean_margins = means[:, 0] - means[:, 1]
    d = dpo.beta * (ratios[:, 0] - ratios[:, 1])
    chosen, rejected = torch.sigmoid(dpo.beta * ratios).unbind(1)
    smoothing = dpo.label_smoothing
    right, wrong = -(1 - smoothing) * logsigmoid(d), -smoothing * logsigmoid(-d)
    losses: dict[str, Callable[[], torch.Tensor]] = {
        "sigmoid": lambda: right + wrong,
        "robust": lambda: (right - wrong) / (1 - 2 * smoothing),
        "hinge": lambda: torch.relu(1 - d),
        "ipo": lambda: (mean_margins - 1 / (2 * dpo.beta)) ** 2,
        "sigmoid_norm": lambda: -logsigmoid(dpo.beta * mean_margins),
        "apo_zero": lambda: 1 - chosen + rejected,
        "apo_down": lambda: chosen + 1 - torch.sigmoid(d),
        "sft": lambda: -scores.logps[:, 0] / mean_chosen_length,
    }
    return torch.stack([weight * losses[name]() for name, weight in dpo.weighted_losses]).sum(0)


def pair_statistics(dpo: DPOConfig, ratios: torch.Tensor, logps: torch.Tensor) -> torch.Tensor:
    """Return the `PreferenceScorer.statistics` of each pair, float64 `[pairs, 6]`.

    `ratios` contains the answers' log-ratios, and `logps` their log-probabilities. Both are float64 `[pairs, 2]`. The
    reward of an answer is beta times its log-ratio. The accuracy is 1 if the chosen answer has the higher reward, 0.5
    if the rewards are equal (0 in TRL), and 0 otherwise.
    """
    rewards = dpo.beta * ratios
    margins = rewards[:, :1] - rewards[:, 1:]
    return torch.cat([rewards, (1 + margins.sign()) / 2, margins, logps], 1)

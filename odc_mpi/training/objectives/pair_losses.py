"""Losses for a pair of answers, as functions of their log-probabilities under the model and the reference model.

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
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from odc_mpi.training.pairs.settings import DPOConfig

#: Names of the columns of `pair_statistics`, the same as those of the metrics in TRL.
STATISTICS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "logps/rejected")


@dataclass(frozen=True)
class PairLogps:
    """Log-probabilities of pairs. Column 0 of each tensor is the chosen answer, column 1 the rejected one.

    Attributes:
        policy: Sum of the log-probabilities of each answer's tokens under the model, float64 `[pairs, 2]`.
        reference: The same sums under the reference model, float64 `[pairs, 2]`.
        lengths: Number of loss tokens in each answer, int64 `[pairs, 2]`.
        mean_chosen_length: Mean number of loss tokens in the minibatch's chosen answers, by which `sft` is divided.
    """

    policy: torch.Tensor
    reference: torch.Tensor
    lengths: torch.Tensor
    mean_chosen_length: float

    @property
    def ratios(self) -> torch.Tensor:
        """Log-ratio of each answer (log-probability minus that under the reference model), float64 `[pairs, 2]`."""
        return self.policy - self.reference

    @property
    def margins(self) -> torch.Tensor:
        """Margin of each pair: log-ratio of the chosen answer minus that of the rejected one, float64 `[pairs]`."""
        return self.ratios[:, 0] - self.ratios[:, 1]

    @property
    def mean_margins(self) -> torch.Tensor:
        """Margin of each pair, computed from mean log-ratios per loss token, float64 `[pairs]`."""
        means = self.ratios / self.lengths
        return means[:, 0] - means[:, 1]


def pair_loss(dpo: DPOConfig, pairs: PairLogps) -> torch.Tensor:
    """Return the weighted sum of the losses in `dpo.loss_type` for each pair, float64 `[pairs]`."""
    losses = [weight * _LOSSES[name](dpo, pairs) for name, weight in dpo.weighted_losses]
    return torch.stack(losses).sum(0)


def pair_statistics(dpo: DPOConfig, pairs: PairLogps) -> torch.Tensor:
    """Return the statistics of each pair, float64 `[pairs, 5]`, without gradients. `STATISTICS` names the columns.

    The reward of an answer is beta times its log-ratio. The accuracy is 1 if the chosen answer has the higher reward,
    0.5 if the rewards are equal (0 in TRL), and 0 otherwise.
    """
    rewards, policy = dpo.beta * pairs.ratios.detach(), pairs.policy.detach()
    accurate = (1 + (rewards[:, :1] - rewards[:, 1:]).sign()) / 2
    return torch.cat([rewards, accurate, policy], 1)


def _sigmoid(dpo: DPOConfig, pairs: PairLogps) -> torch.Tensor:
    d, smoothing = dpo.beta * pairs.margins, dpo.label_smoothing
    return -(1 - smoothing) * logsigmoid(d) - smoothing * logsigmoid(-d)


def _robust(dpo: DPOConfig, pairs: PairLogps) -> torch.Tensor:
    d, smoothing = dpo.beta * pairs.margins, dpo.label_smoothing
    return (-(1 - smoothing) * logsigmoid(d) + smoothing * logsigmoid(-d)) / (1 - 2 * smoothing)


def _hinge(dpo: DPOConfig, pairs: PairLogps) -> torch.Tensor:
    return torch.relu(1 - dpo.beta * pairs.margins)


def _ipo(dpo: DPOConfig, pairs: PairLogps) -> torch.Tensor:
    return (pairs.mean_margins - 1 / (2 * dpo.beta)) ** 2


def _sigmoid_norm(dpo: DPOConfig, pairs: PairLogps) -> torch.Tensor:
    return -logsigmoid(dpo.beta * pairs.mean_margins)


def _apo_zero(dpo: DPOConfig, pairs: PairLogps) -> torch.Tensor:
    chosen, rejected = torch.sigmoid(dpo.beta * pairs.ratios).unbind(1)
    return 1 - chosen + rejected


def _apo_down(dpo: DPOConfig, pairs: PairLogps) -> torch.Tensor:
    return torch.sigmoid(dpo.beta * pairs.ratios[:, 0]) + 1 - torch.sigmoid(dpo.beta * pairs.margins)


def _sft(dpo: DPOConfig, pairs: PairLogps) -> torch.Tensor:
    return -pairs.policy[:, 0] / pairs.mean_chosen_length


_LOSSES: dict[str, Callable[[DPOConfig, PairLogps], torch.Tensor]] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "sigmoid_norm": _sigmoid_norm,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "sft": _sft,
}

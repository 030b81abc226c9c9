"""Log-probabilities of answers under a model, in one forward pass over their prompts and all answers."""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch

from odc_mpi.data.groups import GroupMicrobatch, as_padded_rows
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.models.token_logps import TokenScores
from odc_mpi.observe.metrics import RESULT, Metric

_LOG_RATIO = "times the log-ratio to the reference model"
#: Declarations of metrics that objectives with a reference model have in common, with the names of TRL.
ANSWER_METRICS = (
    Metric(
        "rewards/margins", "difference of the rewards of both answers or kinds", RESULT, "", "{:.4f}", ("margin", 8)
    ),
    Metric("rewards/chosen", f"reward of chosen or desirable answers: `beta` {_LOG_RATIO}", RESULT),
    Metric("rewards/rejected", "reward of rejected or undesirable answers", RESULT),
    Metric("logps/chosen", "log-probability of chosen or desirable answers", RESULT),
    Metric("logps/rejected", "log-probability of rejected or undesirable answers", RESULT),
    Metric("entropy", "mean entropy of the predictions in nats", RESULT),
)


class AnswerScores(NamedTuple):
    """Results of a forward pass over groups of n answers each. In pairs, answer 0 is the chosen one.

    Attributes:
        logps: Sum of the log-probabilities of each answer's tokens, float64 `[groups, n]`, with gradients.
        lengths: Number of loss tokens in each answer, int64 `[groups, n]`.
        entropy: Sum of the entropies at all loss tokens, in nats. This is a scalar without gradients.
        router_loss: Auxiliary router loss, or None, as in `TokenScores`.
    """

    logps: torch.Tensor
    lengths: torch.Tensor
    entropy: torch.Tensor
    router_loss: torch.Tensor | None


class AnswerLogps:
    """Computes the log-probabilities of the answers in groups under a model, whose `TokenLogps` is `token_logps`.

    The groups of a microbatch have equally many answers. If `packs` is False, each answer is in a separate row, and a
    microbatch must have only one group (see `data.groups.as_padded_rows`).
    """

    def __init__(self, token_logps: Callable[..., TokenScores], packs: bool) -> None:
        self._token_logps, self._packs = token_logps, packs

    def __call__(self, microbatch: Microbatch) -> AnswerScores:
        """Run the model on a microbatch of groups whose tensors are on the model's device. One-sided."""
        groups = cast(GroupMicrobatch, microbatch)
        shape = len(groups.indices), -1
        num_answers = len(groups.inputs["cu_seq_lens_q"]) - 1
        groups = groups if self._packs else as_padded_rows(groups)
        scores = self._token_logps(groups.inputs, groups.logit_positions, groups.targets)
        # In float64, since the loss depends on small differences of these sums.
        sums = torch.zeros(num_answers, dtype=torch.float64, device=scores.logps.device)
        logps = sums.index_add(0, groups.answers, scores.logps.double()).reshape(shape)
        ones = torch.ones_like(groups.answers)  # unlike `bincount`, the sum does not wait for a GPU
        lengths = torch.zeros_like(sums, dtype=torch.int64).index_add(0, groups.answers, ones).reshape(shape)
        return AnswerScores(logps, lengths, scores.entropy.sum(), scores.router_loss)

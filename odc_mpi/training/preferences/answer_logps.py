"""Log-probabilities of answers under a model, in one forward pass over their prompts and all answers."""

from typing import NamedTuple, cast

import torch

from odc_mpi.data.groups import GroupMicrobatch, as_padded_rows
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.models.token_logps import TokenLogps


class AnswerScores(NamedTuple):
    """Results of a forward pass over pairs. In pairs, answer 0 is the chosen one.

    Attributes:
        logps: Sum of the log-probabilities of each answer's tokens, float64 `[pairs, 2]`, with gradients.
        lengths: Number of loss tokens in each answer, int64 `[pairs, 2]`.
        entropy: Sum of the entropies at all loss tokens, in nats. This is a scalar without gradients.
        router_loss: Auxiliary router loss, or None, as in `TokenScores`.
    """

    logps: torch.Tensor
    lengths: torch.Tensor
    entropy: torch.Tensor
    router_loss: torch.Tensor | None


class AnswerLogps:
    """Computes the log-probabilities of both answers in each pair under a model.

    If `packs` is False, each answer is in a separate row, and a microbatch must have only one pair (see
    `data.groups.as_padded_rows`).
    """

    def __init__(self, module: torch.nn.Module, packs: bool) -> None:
        self._token_logps, self._packs = TokenLogps(module), packs

    def __call__(self, microbatch: Microbatch) -> AnswerScores:
        """Run the model on a microbatch of pairs whose tensors are on the model's device. One-sided."""
        pairs = cast(GroupMicrobatch, microbatch)
        pairs = pairs if self._packs else as_padded_rows(pairs)
        scores = self._token_logps(pairs.inputs, pairs.logit_positions, pairs.targets)
        num_answers = 2 * len(pairs.indices)
        # In float64, since the loss depends on small differences of these sums.
        sums = torch.zeros(num_answers, dtype=torch.float64, device=scores.logps.device)
        logps = sums.index_add(0, pairs.answers, scores.logps.double()).reshape(-1, 2)
        ones = torch.ones_like(pairs.answers)  # unlike `bincount`, the sum does not wait for a GPU
        lengths = torch.zeros_like(sums, dtype=torch.int64).index_add(0, pairs.answers, ones).reshape(-1, 2)
        return AnswerScores(logps, lengths, scores.entropy.sum(), scores.router_loss)

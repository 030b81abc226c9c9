"""Direct preference optimization (DPO, arXiv 2305.18290) and related losses for pairs of answers."""

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from typing_extensions import override

from odc_mpi.data.loader import Minibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.data.pairs.microbatch import PairMicrobatch, as_padded_rows
from odc_mpi.models.logps.token_logps import TokenLogps
from odc_mpi.training.objectives.pair_losses import STATISTICS, PairLogps, pair_loss, pair_statistics
from odc_mpi.training.objectives.pairs import PairObjective, PairScorer, PairScores
from odc_mpi.training.pairs.settings import DPOConfig


class AnswerScores(NamedTuple):
    """Log-probabilities of the answers in pairs under a model, and other results of the same forward pass.

    Column 0 is the chosen answer, column 1 the rejected one.

    Attributes:
        logps: Sum of the log-probabilities of each answer's tokens, float64 `[pairs, 2]`, with gradients.
        lengths: Number of loss tokens in each answer, int64 `[pairs, 2]`.
        entropy: Sum of the entropies at all loss tokens, in nats; a scalar without gradients.
        router_loss: Auxiliary router loss, or None, as in `TokenScores`.
    """

    logps: torch.Tensor
    lengths: torch.Tensor
    entropy: torch.Tensor
    router_loss: torch.Tensor | None


class AnswerLogps:
    """Computes the log-probabilities of both answers in each pair under a model.

    `packs` is True if the model supports packed sequences. Otherwise, each microbatch has one pair, whose answers are
    computed in separate rows (see `data.pairs.microbatch.as_padded_rows`).
    """

    def __init__(self, module: torch.nn.Module, packs: bool) -> None:
        self._token_logps, self._packs = TokenLogps(module), packs

    def __call__(self, microbatch: Microbatch) -> AnswerScores:
        """Run the model on a microbatch of pairs whose tensors are on the model's device. One-sided."""
        pairs = cast(PairMicrobatch, microbatch)
        pairs = pairs if self._packs else as_padded_rows(pairs)
        scores = self._token_logps(pairs.inputs, pairs.logit_positions, pairs.targets)
        num_answers = 2 * len(pairs.indices)
        # In float64, since the loss depends on small differences of these sums.
        sums = torch.zeros(num_answers, dtype=torch.float64, device=scores.logps.device)
        logps = sums.index_add(0, pairs.answers, scores.logps.double()).reshape(-1, 2)
        ones = torch.ones_like(pairs.answers)  # unlike `bincount`, the sum does not wait for a GPU
        lengths = torch.zeros_like(sums, dtype=torch.int64).index_add(0, pairs.answers, ones).reshape(-1, 2)
        return AnswerScores(logps, lengths, scores.entropy.sum(), scores.router_loss)


class PreferenceScorer(PairScorer):
    """Computes the DPO loss of each pair and the rewards of its answers.

    `reference`, float64 `[pairs, 2]`, contains the log-probabilities of all pairs in the data set under the reference
    model. The values may be filled in after construction, but must be complete before the first call.
    """

    statistics = STATISTICS
    token_sums = ("entropy",)

    def __init__(self, answer_logps: AnswerLogps, dpo: DPOConfig, reference: torch.Tensor) -> None:
        self._answer_logps, self._dpo, self._reference = answer_logps, dpo, reference

    @override
    def __call__(self, minibatch: Minibatch, microbatch: Microbatch) -> PairScores:
        scores = self._answer_logps(microbatch)
        counts = minibatch.dataset.pair_counts
        assert counts is not None
        reference = self._reference[microbatch.indices].to(scores.logps.device, non_blocking=True)
        mean_chosen_length = float(counts[minibatch.indices, 2].mean())
        pairs = PairLogps(scores.logps, reference, scores.lengths, mean_chosen_length)
        statistics = pair_statistics(self._dpo, pairs)
        return PairScores(pair_loss(self._dpo, pairs), statistics, scores.entropy.double()[None], scores.router_loss)

    @override
    def derived_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {"rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"]}


class DPOObjective(PairObjective, margin="rewards/margins", accuracy="rewards/accuracies"):
    """Mean of `pair_losses.pair_loss` over all pairs in a minibatch, plus the auxiliary router loss, if any."""

"""Direct preference optimization (DPO, arXiv 2305.18290) and related losses of pairs of answers."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, cast

import torch

from odc_mpi.data.loader import Minibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.data.pairs.microbatch import PairMicrobatch, as_padded_rows
from odc_mpi.models.logps.token_logps import TokenLogps
from odc_mpi.observe.callback import Step
from odc_mpi.observe.metrics import ProgressColumn
from odc_mpi.shard import model as sharded
from odc_mpi.training.dpo.reference import ReferenceLogps
from odc_mpi.training.dpo.settings import DPOConfig
from odc_mpi.training.loop import Objective
from odc_mpi.training.objectives.pair_losses import STATISTICS, PairLogps, pair_loss, pair_statistics
from odc_mpi.training.objectives.pairs import PairObjective


class AnswerScores(NamedTuple):
    """Log-probabilities of the answers of pairs under a model, and further results of its forward pass.

    Column 0 is the chosen answer, column 1 the rejected one.

    Attributes:
        logps: Sum of the log-probabilities of each answer, float64 `[pairs, 2]`, with gradients.
        lengths: Number of loss tokens of each answer, int64 `[pairs, 2]`.
        entropy: Sum of the entropies of all loss tokens in nats, a scalar.
        router_loss: As in `TokenScores`.
    """

    logps: torch.Tensor
    lengths: torch.Tensor
    entropy: torch.Tensor
    router_loss: torch.Tensor | None


class AnswerLogps:
    """Computes log-probabilities of the answers of pairs under a model.

    `packs` is True for models that train on packed sequences. For others, each answer is a row of its own; see
    `data.pairs.microbatch.as_padded_rows`.
    """

    def __init__(self, module: torch.nn.Module, packs: bool) -> None:
        self._token_logps, self._packs = TokenLogps(module), packs

    def __call__(self, microbatch: Microbatch) -> AnswerScores:
        """Run the model on a microbatch of pairs, whose tensors are on its device. One-sided."""
        pairs = cast(PairMicrobatch, microbatch)
        pairs = pairs if self._packs else as_padded_rows(pairs)
        scores = self._token_logps(pairs.inputs, pairs.logit_positions, pairs.targets)
        num_answers = 2 * len(pairs.indices)
        # In float64, since differences of these sums decide.
        sums = torch.zeros(num_answers, dtype=torch.float64, device=scores.logps.device)
        logps = sums.index_add(0, pairs.answers, scores.logps.double()).reshape(-1, 2)
        lengths = torch.bincount(pairs.answers, minlength=num_answers).reshape(-1, 2)
        return AnswerScores(logps, lengths, scores.entropy.sum(), scores.router_loss)


class DPOObjective(PairObjective):
    """Mean of `pair_losses.pair_loss` over all pairs of a minibatch, plus the loss of routers, if any.

    Before the first step it loads or computes the log-probabilities under the reference model.
    """

    columns: ClassVar = (
        *Objective.columns,
        ProgressColumn("margin", 8, lambda line: f"{line['rewards/margins']:.4f}"),
        ProgressColumn("accuracy", 8, lambda line: f"{line['rewards/accuracies']:.1%}"),
    )
    summed_names = gathered_names = ("loss", "entropy", *STATISTICS)

    def __init__(self, answer_logps: AnswerLogps, dpo: DPOConfig, reference: ReferenceLogps) -> None:
        self._answer_logps, self._dpo, self._reference = answer_logps, dpo, reference

    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        """Load or compute the log-probabilities of the reference model. Collective."""
        self._reference.prepare(completed_steps)

    def loss_and_statistics(self, minibatch: Minibatch, microbatch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the contributions of a microbatch to the mean loss, and to the other means. One-sided."""
        scores = self._answer_logps(microbatch)
        counts = minibatch.dataset.pair_counts
        assert counts is not None
        num_pairs = len(minibatch.indices)
        reference = self._reference.training[microbatch.indices].to(scores.logps.device)
        mean_chosen_length = float(counts[minibatch.indices, 2].mean())
        pairs = PairLogps(scores.logps, reference, scores.lengths, mean_chosen_length)
        loss = pair_loss(self._dpo, pairs).sum() / num_pairs
        if scores.router_loss is not None:
            loss = loss + scores.router_loss * (microbatch.num_tokens / minibatch.num_tokens)
        entropy = scores.entropy.double() / minibatch.num_tokens
        return loss, torch.cat([entropy[None], pair_statistics(self._dpo, pairs).sum(0) / num_pairs])

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Add the metrics of `DPOTrainer` in TRL to those of the step: means over the pairs of all ranks."""
        super().on_gathered(step, gathered)
        metrics = step.metrics
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]

    def state_dict(self) -> dict[str, Any]:
        """Return the digest of the reference model."""
        return {"reference": self._reference.model_digest}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the digest of the reference model, whose log-probabilities `on_train_begin` then loads."""
        self._reference.model_digest = state_dict["reference"]

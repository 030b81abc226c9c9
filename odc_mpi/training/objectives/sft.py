"""Supervised fine-tuning objective: mean next-token cross entropy over all loss tokens in a minibatch."""

import torch

from odc_mpi.data.loader import Minibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.models.logps.token_logps import TokenLogps
from odc_mpi.observe.callback import MicrobatchResult, Step, round_for_exact_sum
from odc_mpi.shard import model as sharded
from odc_mpi.training.loop import Objective

#: Bound for `round_for_exact_sum`: sums of losses are exact if the mean loss is below 2**8 times this number.
MAX_EXACT_LOSS = 256.0


class SFTObjective(Objective):
    """Mean cross entropy over all loss tokens in a minibatch, plus the auxiliary router loss, if any."""

    gathered_names = ("loss", "correct_tokens", "entropy")

    def __init__(self, module: torch.nn.Module) -> None:
        self._token_logps = TokenLogps(module)

    def on_step_begin(self, step: Step) -> None:
        """Reset all sums for this step."""
        self._loss, self._num_correct, self._entropy = 0.0, 0, 0.0

    def loss(self, model: sharded.ShardedModel, minibatch: Minibatch, microbatch: Microbatch) -> torch.Tensor:
        """Return the contribution of a microbatch to the mean loss of the minibatch. One-sided."""
        scores = self._token_logps(microbatch.inputs, microbatch.logit_positions, microbatch.targets)
        entropy = scores.entropy.sum() / minibatch.num_tokens
        self.statistics = torch.stack([scores.is_top.sum().double(), entropy.double()])
        loss = -scores.logps.sum() / minibatch.num_tokens
        if scores.router_loss is not None:
            loss = loss + scores.router_loss * (microbatch.num_tokens / minibatch.num_tokens)
        return loss

    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        """Add a microbatch's loss, entropy and number of correct predictions to the sums."""
        num_correct, entropy = result.statistics
        self._loss += round_for_exact_sum(result.loss, MAX_EXACT_LOSS)
        self._num_correct += int(num_correct)
        self._entropy += round_for_exact_sum(entropy, MAX_EXACT_LOSS)

    def local_values(self) -> tuple[float, ...]:
        """Return the sums over this rank's microbatches, in the order of `gathered_names`."""
        return self._loss, self._num_correct, self._entropy

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Add the loss, accuracy, entropy and number of loss tokens to the metrics of the step."""
        num_tokens = step.minibatch.num_tokens
        step.metrics |= {
            "loss": gathered.sum("loss"),
            "mean_token_accuracy": gathered.sum("correct_tokens") / num_tokens,
            "entropy": gathered.sum("entropy"),
            "num_tokens": num_tokens,
        }

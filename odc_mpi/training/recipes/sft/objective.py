"""Supervised fine-tuning: mean next-token cross entropy over all loss tokens, and evaluation on held-out sequences."""

import math

import torch

from odc_mpi.data.loader import PlannedMinibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.models.token_logps import TokenLogps
from odc_mpi.observe.callback import Step, round_for_exact_sum
from odc_mpi.observe.metrics import RESULT, Metric
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.training.evaluation import HeldOutEvaluator
from odc_mpi.training.loop import Objective

#: Bound for `round_for_exact_sum`: sums of losses are exact if the mean loss is below 2**8 times this number.
MAX_EXACT_LOSS = 256.0


class SFTObjective(Objective):
    """Mean cross entropy over all loss tokens in a minibatch, plus the auxiliary router loss, if any."""

    gathered_names = ("loss", "correct_tokens", "entropy")
    max_summand = MAX_EXACT_LOSS
    metrics = (
        *Objective.metrics,
        Metric("mean_token_accuracy", "share of loss tokens that were the most likely", RESULT),
        Metric("entropy", "mean entropy of the predictions in nats", RESULT),
    )

    def __init__(self, module: torch.nn.Module) -> None:
        self._token_logps = TokenLogps(module)

    def loss(self, minibatch: PlannedMinibatch, microbatch: Microbatch) -> torch.Tensor:
        """Return a microbatch's contribution to the mean loss of the minibatch. One-sided."""
        scores = self._token_logps(microbatch.inputs, microbatch.logit_positions, microbatch.targets)
        entropy = scores.entropy.sum() / minibatch.num_tokens
        self.statistics = torch.stack([scores.is_top.sum().double(), entropy.double()])
        loss = -scores.logps.sum() / minibatch.num_tokens
        if scores.router_loss is not None:
            loss = loss + scores.router_loss * (microbatch.num_tokens / minibatch.num_tokens)
        return loss

    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        """Add metrics for the loss tokens of all ranks to the step."""
        loss, num_correct, entropy = self.reduce(gathered).values()
        num_tokens = step.minibatch.num_tokens
        metrics = {"mean_token_accuracy": num_correct / num_tokens, "entropy": entropy, "num_tokens": num_tokens}
        step.metrics |= {"loss": loss, **metrics}


class LossEvaluator(HeldOutEvaluator[TokenLogps]):
    """Computes the model's loss, perplexity and token accuracy on held-out sequences."""

    metrics = (
        *HeldOutEvaluator.metrics,
        Metric("eval_perplexity", "held-out perplexity", RESULT, "final", "perplexity {:,.4g}", row="eval loss"),
        Metric("eval_mean_token_accuracy", "share of held-out loss tokens that were the most likely", RESULT),
    )

    def evaluate(self) -> dict[str, float]:
        """Return the mean loss per loss token, the perplexity and the mean token accuracy. Collective."""
        num_tokens = self._minibatch.num_tokens
        losses, counts = zip(*self._forward_pass.run(self._minibatch, self._score), strict=True)
        loss, accuracy = sum(losses) / num_tokens, sum(counts) / num_tokens
        perplexity = math.inf if loss > 709 else math.exp(loss)  # exp(710) overflows
        return {"eval_loss": loss, "eval_perplexity": perplexity, "eval_mean_token_accuracy": accuracy}

    def _score(self, microbatch: Microbatch) -> tuple[float, int]:
        scores = self._scorer(microbatch.inputs, microbatch.logit_positions, microbatch.targets)
        loss = round_for_exact_sum(-float(scores.logps.sum()), MAX_EXACT_LOSS * self._minibatch.num_tokens)
        return loss, int(scores.is_top.sum())

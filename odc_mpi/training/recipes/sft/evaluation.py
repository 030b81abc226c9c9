"""Evaluation on held-out sequences."""

import math

from odc_mpi.data.microbatch import Microbatch
from odc_mpi.models.token_logps import TokenLogps
from odc_mpi.observe.callback import round_for_exact_sum
from odc_mpi.observe.metrics import RESULT, Metric
from odc_mpi.training.evaluation import HeldOutEvaluator
from odc_mpi.training.recipes.sft.objective import MAX_EXACT_LOSS


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

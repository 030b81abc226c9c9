"""Losses of tokens that an older policy generated, with bounded importance weights (`rl.importance_sampling_mode`).

The ratio of a token is its probability under the current policy divided by that under the policy that generated it. The
gradient of a token's loss is `-weight * advantage` times the gradient of its log-probability. c is
`rl.importance_sampling_clip_max`; R is the product and G the geometric mean of the ratios of a completion:

    clip             ratio; 0 where a larger step in the same direction is not wanted, as in PPO (arXiv 1707.06347):
                     above 1 + rl.epsilon_high if the advantage is positive, below 1 - rl.epsilon if it is negative,
                     then also above c (dual clip, arXiv 1912.09729)
    token_truncate   min(ratio, c)
    token_mask       ratio; 0 above c
    sequence_mask    R for all tokens of the completion; 0 above c
    geometric_mask   ratio; 0 for all tokens of the completion if G is above c or below 1 / c
    none             1

Weights of 0 do not change the normalizer of the loss. This module does not communicate.
"""

from typing import NamedTuple

import torch

from odc_mpi.training.recipes.rollouts.settings import RLConfig

#: Bound for the logarithms of ratios, so that their exponentials are finite.
_MAX_LOG_RATIO = 20.0


class WeightedLosses(NamedTuple):
    """Losses of tokens, float `[K]`, with gradients, and per token how their weights came about, without gradients.

    Attributes:
        ratios: Ratios before they are bounded, float `[K]`.
        too_low, too_high: True where the ratio, or that of the completion, is outside of a bound, bool `[K]`.
    """

    losses: torch.Tensor
    ratios: torch.Tensor
    too_low: torch.Tensor
    too_high: torch.Tensor


def weighted_losses(
    rl: RLConfig,
    logps: torch.Tensor,
    sampling_logps: torch.Tensor,
    advantages: torch.Tensor,
    answers: torch.Tensor,
    num_answers: int,
) -> WeightedLosses:
    """Return the losses of tokens for `rl.importance_sampling_mode`, not yet divided by the normalizer.

    K is the number of tokens. This does not communicate.

    Args:
        logps: Log-probabilities under the current policy, float `[K]`, with gradients.
        sampling_logps: Log-probabilities under the policies that generated the tokens, float `[K]`.
        advantages: Advantage of each token, float `[K]`, without gradients.
        answers: Index of each token's completion, int64 `[K]`, below `num_answers`, the number of completions. All
            tokens of a completion must be in the same call.
    """
    log_ratios = logps.detach() - sampling_logps
    ratios, limit, mode = _exp(log_ratios), rl.importance_sampling_clip_max, rl.importance_sampling_mode
    nowhere = torch.zeros_like(ratios, dtype=torch.bool)
    too_low, too_high, weights = nowhere, ratios > limit, ratios
    if mode == "clip":
        high = rl.epsilon if rl.epsilon_high is None else rl.epsilon_high
        upper = torch.where(advantages > 0, 1.0 + high, limit)
        too_low = (advantages < 0) & (ratios < 1.0 - rl.epsilon)
        too_high = (advantages != 0) & (ratios > upper)
        # PPO's loss stays at its bound, where it has no gradient.
        values = torch.where(too_low, 1.0 - rl.epsilon, torch.minimum(ratios, upper))
        weights = ratios.masked_fill(too_low | too_high, 0.0)
    elif mode == "token_truncate":
        values = weights = ratios.clamp(max=limit)
    elif mode == "none":
        too_high = nowhere
        values = weights = torch.ones_like(ratios)
    else:
        if mode != "token_mask":
            ones = torch.ones_like(log_ratios)
            sums, counts = (ones.new_zeros(num_answers).index_add(0, answers, each) for each in (log_ratios, ones))
            products = _exp(sums)[answers]
            means = _exp(sums / counts.clamp(min=1.0))[answers]
            weights, bounded = (products, products) if mode == "sequence_mask" else (ratios, means)
            too_high = bounded > limit
            too_low = bounded < 1.0 / limit if mode == "geometric_mask" else nowhere
        values = weights = weights.masked_fill(too_low | too_high, 0.0)
    surrogate = weights * torch.exp(logps - logps.detach()) + (values - weights)
    return WeightedLosses(-surrogate * advantages, ratios, too_low, too_high)


def _exp(logarithms: torch.Tensor) -> torch.Tensor:
    return logarithms.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()

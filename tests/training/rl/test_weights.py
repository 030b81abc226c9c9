"""Losses of tokens from older policies are those of TRL's code, and of AReaL's and verl's by their formulas."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from odc_mpi.training.recipes.rollouts.settings import RLConfig
from odc_mpi.training.recipes.rollouts.weights import weighted_losses

#: Lengths of the completions, one of which is a single token, and log-ratios far beyond all bounds.
LENGTHS = (7, 1, 12, 5)
LIMIT = 1.5


@pytest.fixture(scope="module", params=["near", "far"])
def tokens(request):
    draws, count = torch.Generator().manual_seed(4), sum(LENGTHS)
    logps = -3 * torch.rand(count, generator=draws, dtype=torch.float64)
    answers = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    spread = {"near": 0.15, "far": 2.0}[request.param]
    noise = torch.randn(count, generator=draws, dtype=torch.float64)
    old = logps - spread * (noise + torch.tensor([0.0, 0.5, -0.8, 0.1], dtype=torch.float64)[answers])
    return logps, old, torch.tensor([1.5, -0.8, -2.0, 0.7], dtype=torch.float64)[answers], answers


def found(mode, tokens, dtype=torch.float64, **settings):
    """Losses, and the derivatives of their sum by the log-probabilities."""
    rl = RLConfig(max_staleness=1, importance_sampling_mode=mode, importance_sampling_clip_max=LIMIT, **settings)
    logps, old, advantages, answers = tokens
    logps = logps.to(dtype).requires_grad_()
    result = weighted_losses(rl, logps, old.to(dtype), advantages.to(dtype), answers, len(LENGTHS))
    [gradient] = torch.autograd.grad(result.losses.sum(), logps)
    return result, gradient


def check(mode, tokens, losses_of, **settings):
    logps = tokens[0].clone().requires_grad_()
    losses = losses_of(logps, *tokens[1:])
    [gradient] = torch.autograd.grad(losses.sum(), logps)
    for dtype in (torch.float64, torch.float32):
        result, own_gradient = found(mode, tokens, dtype, **settings)
        torch.testing.assert_close(result.losses.double(), losses, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(own_gradient.double(), gradient, atol=1e-6, rtol=1e-6)
    return result


def per_completion(values, answers, combine):
    return torch.stack([combine(values[answers == i]) for i in range(len(LENGTHS))])[answers]


def trl_losses(logps, old, advantages, answers, *, correction=None, loss_type="dapo", **settings):
    """`GRPOTrainer._compute_loss` on padded rows. Returns the loss of all tokens, as a sum over one element."""
    trl = pytest.importorskip("trl.trainer.grpo_trainer")
    pad = lambda values: torch.nn.utils.rnn.pad_sequence(  # noqa: E731
        [values[answers == i] for i in range(len(LENGTHS))], batch_first=True
    )
    mask = pad(torch.ones_like(logps))
    trainer = object.__new__(trl.GRPOTrainer)
    accelerator = SimpleNamespace(num_processes=1, gather=lambda value: value, reduce=lambda value, **_: value)
    trainer.__dict__ |= {
        **dict.fromkeys(("aux_loss_enabled", "_entropy_bonus_enabled"), False),
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "loss_type": loss_type,
        "importance_sampling_level": "token",
        "use_vllm": correction is not None,
        "vllm_importance_sampling_correction": True,
        "model": SimpleNamespace(training=True),
        **{"epsilon_low": 0.2, "epsilon_high": 0.2, "current_gradient_accumulation_steps": 1} | settings,
        "args": SimpleNamespace(delta=LIMIT, use_bias_correction_kl=False, steps_per_generation=1),
        "accelerator": accelerator,
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (pad(logps), mask, None),
    }
    inputs = {
        **dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), mask),
        "advantages": torch.stack([advantages[answers == i][0] for i in range(len(LENGTHS))]),
        "num_items_in_batch": torch.tensor(1.0),
        "old_per_token_logps": pad(old) if correction is None else None,
        "importance_sampling_ratio": None if correction is None else pad(correction),
    }
    return trainer._compute_loss(trainer.model, inputs), trainer._metrics["train"]


@pytest.mark.parametrize("high", [None, 0.28])
def test_clipping_is_that_of_trl(tokens, high):
    logps, *rest = (tokens[0].clone().requires_grad_(), *tokens[1:])
    loss, metrics = trl_losses(logps, *rest, epsilon_high=high or 0.2)
    [gradient] = torch.autograd.grad(loss, logps)
    result, own_gradient = found("clip", tokens, epsilon_high=high)
    assert result.losses.sum().item() == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(own_gradient, gradient, atol=1e-6, rtol=1e-6)
    assert result.too_low.double().mean().item() == pytest.approx(metrics["clip_ratio/low_mean"][0])
    beyond = result.too_high & (tokens[2] > 0)  # TRL does not count those that its `delta` bounds
    assert beyond.double().mean().item() == pytest.approx(metrics["clip_ratio/high_mean"][0])


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_mask"])
def test_corrections_are_those_of_trl(tokens, mode):
    """By TRL's loss, with the ratios that its `_generate_and_score_completions` would pass to it."""
    logps, old, advantages, answers = (tokens[0].clone().requires_grad_(), *tokens[1:])
    ratios = torch.exp(logps.detach() - old)
    if mode == "sequence_mask":
        ratios = per_completion(ratios, answers, torch.prod)
    ratios = ratios.clamp(max=LIMIT) if "truncate" in mode else ratios.masked_fill(ratios > LIMIT, 0.0)
    loss, _ = trl_losses(logps, old, advantages, answers, correction=ratios)
    [gradient] = torch.autograd.grad(loss, logps)
    result, own_gradient = found(mode, tokens)
    assert result.losses.sum().item() == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(own_gradient, gradient, atol=1e-6, rtol=1e-6)


def areal(cap=None, level="token", c_clip=None, high=0.2, behavior_is_proximal=False):
    """AReaL's decoupled loss, where the proximal policy is the current one, or its plain PPO with `c_clip`."""

    def losses(logps, old, advantages, answers):
        proximal = old if behavior_is_proximal else logps.detach()
        ratios = torch.exp(logps - proximal)
        clipped = torch.clamp(ratios, 0.8, 1 + high)
        loss = torch.maximum(-advantages * ratios, -advantages * clipped)
        if c_clip is not None:
            loss = torch.minimum(loss, torch.sign(advantages) * c_clip * advantages)
        behavior = torch.exp(proximal - old)
        if level == "geometric":
            means = per_completion(proximal - old, answers, torch.mean).exp()
            behavior = torch.where((means <= cap) & (means >= 1 / cap), behavior, 0.0)
        elif cap is not None:
            behavior = torch.where(behavior <= cap, behavior, 0.0)
        return loss * behavior

    return losses


def test_losses_are_those_of_areal(tokens):
    check("token_mask", tokens, areal(cap=LIMIT))
    result = check("geometric_mask", tokens, areal(cap=LIMIT, level="geometric"))
    assert result.too_low.any() == result.too_high.any() == ((tokens[0] - tokens[1]).abs().max() > 1)
    check("clip", tokens, areal(c_clip=LIMIT, high=0.3, behavior_is_proximal=True), epsilon_high=0.3)


def verl(truncated=None):
    """verl's bypass mode: PPO against the policy that generated, or REINFORCE with truncated weights."""

    def losses(logps, old, advantages, answers):
        ratios = torch.exp(torch.clamp(logps - old, -20, 20))
        if truncated:  # its value is up to a constant, since it has the log-probability itself
            return -advantages * ratios.detach().clamp(max=truncated) * torch.exp(logps - logps.detach())
        upper = torch.maximum(-advantages * ratios, -advantages * torch.clamp(ratios, 0.8, 1.2))
        return torch.where(advantages < 0, torch.minimum(-advantages * LIMIT, upper), upper)

    return losses


def test_losses_are_those_of_verl(tokens):
    check("clip", tokens, verl())
    check("token_truncate", tokens, verl(truncated=LIMIT))


def test_no_weights(tokens):
    result = check("none", tokens, lambda logps, old, advantages, answers: -advantages * (logps - logps.detach()).exp())
    assert not (result.too_low | result.too_high).any()


def test_ratios_that_no_number_holds_have_finite_losses(tokens):
    far = tokens[0], tokens[0] - 1e4, *tokens[2:]
    for mode in ("clip", "token_truncate", "token_mask", "sequence_mask", "geometric_mask", "none"):
        result, gradient = found(mode, far, torch.float32)
        assert result.losses.isfinite().all() and gradient.abs().max() <= LIMIT * 2.0

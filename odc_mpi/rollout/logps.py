"""Log-probabilities of given tokens, computed without storing the logits of all positions.

The forward and the backward apply the head of the model to blocks of positions. Only the logits of one block are in
memory, whose size does not depend on the vocabulary size or the sequence lengths.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

#: Maximum number of logits in memory. In float32 they take 256 MiB.
MAX_ELEMENTS = 1 << 26
#: Settings of models that transform logits after the head.
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "output_multiplier_scale")


class TokenLogps(torch.autograd.Function):
    """Autograd function that computes log-probabilities of tokens from hidden states and a linear head."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
    ) -> torch.Tensor:
        """Return the log-probabilities of the tokens `targets`, float32 `[K]`.

        The logits are divided by `temperature`. `hidden` is `[K, hidden_size]`, `weight` `[vocab_size, hidden_size]`,
        `bias` `[vocab_size]` or None, and `targets` int64 `[K]`.
        """
        logps = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        for block in _blocks(len(targets), len(weight)):
            logits = nn.functional.linear(hidden[block], weight, bias).float() / temperature
            logps[block] = logits.gather(1, targets[block, None])[:, 0] - logits.logsumexp(-1)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.temperature = temperature
        return logps

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients of the hidden states, the weight and the bias."""
        hidden, weight, bias, targets = ctx.saved_tensors
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        bias_grad = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for block in _blocks(len(targets), len(weight)):
            logits = nn.functional.linear(hidden[block], weight, bias).float() / ctx.temperature
            logits_grad = logits.softmax(-1).neg_()
            logits_grad[torch.arange(len(logits), device=logits.device), targets[block]] += 1.0
            logits_grad *= (gradient[block] / ctx.temperature)[:, None]
            logits_grad = logits_grad.to(hidden.dtype)
            hidden_grad[block] = logits_grad @ weight
            if weight_grad is not None:
                weight_grad.addmm_(logits_grad.T, hidden[block])
            if bias_grad is not None:
                bias_grad += logits_grad.sum(0)
        return hidden_grad, weight_grad, bias_grad, None, None


def _blocks(count: int, vocab_size: int) -> Iterator[slice]:
    step = max(1, MAX_ELEMENTS // vocab_size)
    return (slice(begin, begin + step) for begin in range(0, count, step))


def token_logps(
    module: Any, inputs: dict[str, Any], logit_positions: torch.Tensor, targets: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the log-probabilities of tokens under a model, float32 `[K]`. One-sided if the model is sharded.

    `module` is a causal language model of transformers, `inputs` the arguments of its forward for a batch of one row.
    Logits at `logit_positions`, int64 `[K]`, predict `targets`, int64 `[K]`, and are divided by `temperature`.
    """
    head = module.get_output_embeddings()
    if type(head) is nn.Linear and not any(getattr(module.config, name, None) for name in _LOGIT_TRANSFORMS):
        with _replaced_head(head, targets, temperature):
            logps: torch.Tensor = module(**inputs, logits_to_keep=logit_positions).logits[0, :, 0]
            return logps
    # The model transforms the logits, or the head has adapters: use the complete logits.
    logits = module(**inputs, logits_to_keep=logit_positions).logits[0].float() / temperature
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)


@contextmanager
def _replaced_head(head: nn.Linear, targets: torch.Tensor, temperature: float) -> Iterator[None]:
    """Let a head return the log-probabilities of tokens instead of logits in the enclosed forward."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        logps: torch.Tensor = TokenLogps.apply(hidden[0], head.weight, head.bias, targets, temperature)
        return logps[None, :, None]

    head.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del head.forward

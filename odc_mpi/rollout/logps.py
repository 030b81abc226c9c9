"""Log-probabilities of given tokens, without the logits of all places at once. Local, or one-sided.

The head of the model is computed a chunk of places after the other, in the forward and again in the backward: memory
for logits is that of one chunk, whatever the vocabulary and the lengths are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

#: Elements of the logits that exist at once, float32: 256 MiB.
MAX_ELEMENTS = 1 << 26
#: Settings of models that change logits behind the head.
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "output_multiplier_scale")


class TokenLogps(torch.autograd.Function):
    """Log-probabilities of tokens from hidden states and the weight of a linear head."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
    ) -> torch.Tensor:
        """Return the log-probabilities, float32 [K].

        Args:
            ctx: Autograd's.
            hidden: [K, hidden_size].
            weight: [vocab_size, hidden_size].
            bias: [vocab_size], or None.
            targets: int64 [K].
            temperature: What logits are divided by.
        """
        found = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        for part in _parts(len(targets), len(weight)):
            logits = nn.functional.linear(hidden[part], weight, bias).float() / temperature
            found[part] = logits.gather(1, targets[part, None])[:, 0] - logits.logsumexp(-1)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.temperature = temperature
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients of hidden states, weight and bias."""
        hidden, weight, bias, targets = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for part in _parts(len(targets), len(weight)):
            logits = nn.functional.linear(hidden[part], weight, bias).float() / ctx.temperature
            of_logits = logits.softmax(-1).neg_()
            of_logits[torch.arange(len(logits), device=logits.device), targets[part]] += 1.0
            of_logits *= (gradient[part] / ctx.temperature)[:, None]
            of_logits = of_logits.to(hidden.dtype)
            of_hidden[part] = of_logits @ weight
            if of_weight is not None:
                of_weight.addmm_(of_logits.T, hidden[part])
            if of_bias is not None:
                of_bias += of_logits.sum(0)
        return of_hidden, of_weight, of_bias, None, None


def _parts(count: int, vocab_size: int) -> Iterator[slice]:
    step = max(1, MAX_ELEMENTS // vocab_size)
    return (slice(begin, begin + step) for begin in range(0, count, step))


def token_logps(
    module: Any, inputs: dict[str, Any], logit_positions: torch.Tensor, targets: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the log-probabilities of tokens under a model, float32 [K]. One-sided, on a sharded model's module.

    Args:
        module: A causal language model of transformers; of a sharded model its `module`.
        inputs: Its arguments, of one row.
        logit_positions: Whose logits predict the tokens, int64 [K].
        targets: The tokens, int64 [K].
        temperature: What logits are divided by.
    """
    head = module.get_output_embeddings()
    if type(head) is nn.Linear and not any(getattr(module.config, name, None) for name in _LOGIT_TRANSFORMS):
        with _replaced_head(head, targets, temperature):
            found: torch.Tensor = module(**inputs, logits_to_keep=logit_positions).logits[0, :, 0]
            return found
    # What the model does to logits behind the head is not known here, nor what an adapted head is.
    logits = module(**inputs, logits_to_keep=logit_positions).logits[0].float() / temperature
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)


@contextmanager
def _replaced_head(head: nn.Linear, targets: torch.Tensor, temperature: float) -> Iterator[None]:
    """Have a head return the log-probabilities of tokens in place of logits in the enclosed forward."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = TokenLogps.apply(hidden[0], head.weight, head.bias, targets, temperature)
        return found[None, :, None]

    head.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del head.forward

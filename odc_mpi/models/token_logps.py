"""Log-probabilities of given tokens, computed without storing the logits of all positions.

Logits are computed only at the given positions, in blocks, and only one block is in memory at a time. `TokenLogps`
describes the exceptions. To obtain logits, a model may apply a function to the output of its head (`LogitTransform`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from odc_mpi.models.heads import replaced_forwards
from odc_mpi.models.quirks.logit_transform import LogitTransform
from odc_mpi.models.quirks.router_loss import scaled_router_loss

#: Maximum number of logits per block, keyed by device type: 64 and 512 MiB in float32. For each block, the head is read
#: and its gradient is updated. On a GPU, this takes longer than small matrix products (benchmarks/notes/gpu.md).
MAX_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}


class TokenScores(NamedTuple):
    """Predictions of a model for given tokens.

    Attributes:
        logps: Log-probability of each token, float32 or float64 `[K]`, with gradients.
        entropy: Entropy of each predicted distribution in nats, float32 or float64 `[K]`, without gradients.
        is_top: True for each token that is the most likely one in its distribution, bool `[K]`.
        router_loss: Auxiliary router loss of a mixture of experts, multiplied by its coefficient. It is a scalar with
            gradients, or None if the model has no routers or `output_router_logits` is not set.
    """

    logps: torch.Tensor
    entropy: torch.Tensor
    is_top: torch.Tensor
    router_loss: torch.Tensor | None = None


class TokenLogps:
    """Callable that computes the log-probabilities of given tokens under a causal language model, sharded or not.

    Usually, logits are computed only where they predict a given token. The logits of all positions are computed if the
    head is not a plain linear layer (for example, if it has adapters), or if the function that the model applies to the
    output of its head is not a `LogitTransform`.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._head = module.get_output_embeddings()
        self._transform = LogitTransform.from_model(module) if type(self._head) is nn.Linear else None

    def __call__(
        self, inputs: Mapping[str, Any], positions: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
    ) -> TokenScores:
        """Run the model and return its predictions for the tokens `targets`. One-sided if the model is sharded.

        Args:
            inputs: Keyword arguments for the model. Labels are ignored.
            positions: Positions whose logits predict `targets`, as indices into the flattened batch, int64 `[K]`.
            targets: Token ids, int64 `[K]`.
            temperature: Sampling temperature, by which the logits are divided.
        """
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        if self._transform is None:
            output = self._module(**inputs)
            scores = _complete_scores(output.logits.flatten(0, 1)[positions], targets, temperature)
        else:
            transform = replace(self._transform, temperature=temperature)
            calls: list[TokenScores] = []

            def head(hidden: torch.Tensor) -> torch.Tensor:
                rows = hidden.flatten(0, -2)[positions]
                calls.append(
                    TokenScores(*ChunkedLogps.apply(rows, self._head.weight, self._head.bias, targets, transform))
                )
                return hidden.new_zeros(1, 1, 1)  # the model transforms it; the result is not used

            with replaced_forwards({self._head: head}):
                output = self._module(**inputs)
            (scores,) = calls
        return scores._replace(router_loss=scaled_router_loss(self._module, output))


class ChunkedLogps(torch.autograd.Function):
    """Autograd function that computes log-probabilities from hidden states and a linear head, in blocks of tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        transform: LogitTransform,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `logps`, `entropy` and `is_top` as in `TokenScores`, each `[K]`.

        `hidden` is `[K, hidden_size]`. The head's parameters are `weight`, `[vocab_size, hidden_size]`, and `bias`,
        `[vocab_size]` or None. `targets` contains token ids, int64 `[K]`. `transform` is applied to head outputs.
        """
        blocks = list(_blocks(len(targets), weight))
        parts = []
        probabilities = None
        for block in blocks:
            logits = transform(nn.functional.linear(hidden[block], weight, bias))
            scores, probabilities = _score(logits, targets[block])
            parts.append(scores)
        # The probabilities are saved, not computed again, if there is a single block. A soft cap needs the logits, too.
        keep = len(blocks) == 1 and transform.soft_cap is None and any(ctx.needs_input_grad)
        ctx.save_for_backward(hidden, weight, bias, targets, probabilities if keep else None)
        ctx.transform = transform
        logps, entropy, is_top = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.mark_non_differentiable(entropy, is_top)
        return logps, entropy, is_top

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        """Return the gradients of `hidden`, `weight` and `bias`. The last two have at least float32 precision."""
        hidden, weight, bias, targets, saved = ctx.saved_tensors
        transform: LogitTransform = ctx.transform
        hidden_grad = torch.empty_like(hidden)
        weight_grad = _zeros_like(weight) if ctx.needs_input_grad[1] else None
        bias_grad = _zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for block in _blocks(len(targets), weight):
            logits = None
            if saved is None:
                logits = transform(nn.functional.linear(hidden[block], weight, bias))
                logits_grad = logits.softmax(-1).mul_(-gradient[block, None])
            else:
                logits_grad = saved * -gradient[block, None]
            logits_grad.scatter_add_(1, targets[block, None], gradient[block, None].to(logits_grad.dtype))
            logits_grad = transform.backward_(logits_grad, logits).to(hidden.dtype)
            hidden_grad[block] = logits_grad @ weight
            if weight_grad is not None and weight_grad.dtype == hidden.dtype:
                weight_grad.addmm_(logits_grad.T, hidden[block])
            elif weight_grad is not None:
                weight_grad += logits_grad.T @ hidden[block]
            if bias_grad is not None:
                bias_grad += logits_grad.sum(0)
        return hidden_grad, weight_grad, bias_grad, None, None


def _score(
    logits: torch.Tensor, targets: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the log-probability, entropy and `is_top` of each target, and the probabilities of all tokens."""
    probabilities = logits.softmax(-1)
    top, top_index = logits.max(-1)
    # Unlike `logsumexp`, this needs no further pass over the logits. The largest probability is not small.
    normalizer = top - probabilities.gather(1, top_index[:, None])[:, 0].log()
    chosen = logits.gather(1, targets[:, None])[:, 0]
    entropy = normalizer - (probabilities[:, None] @ logits[..., None])[:, 0, 0]
    return (chosen - normalizer, entropy, chosen == top), probabilities


def _complete_scores(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> TokenScores:
    logits = logits.float() / temperature
    logps = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    with torch.no_grad():
        (_, entropy, is_top), _ = _score(logits, targets)
    return TokenScores(logps, entropy, is_top)


def _blocks(count: int, head: torch.Tensor) -> Iterator[slice]:
    step = max(1, MAX_ELEMENTS[head.device.type] // len(head))
    return (slice(begin, begin + step) for begin in range(0, max(1, count), step))


def _zeros_like(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))

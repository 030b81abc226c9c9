"""Attention of a piece of a sequence whose other pieces are on other ranks.

A piece's tokens attend to the keys and values of all earlier pieces, without a mask, and causally to its own. Each part
is one call of a kernel, which returns the log-sum-exp of its scores beside its output. The parts are joined by these,
as blocks are within FlashAttention (arXiv 2205.14135, section 3.1) and between ranks in Ring Attention (arXiv
2310.01889); so no mask of tokens by tokens exists.

    forward    show own keys and values; own part; then a part for each earlier piece, as soon as that one has shown
    backward   gradients of the earlier pieces' keys and values, which are given; own part; then what later pieces give
               is added to the gradients of this piece's keys and values

Given the joined output and log-sum-exp, the kernel's backward of a part yields exactly that part's gradients.
Keys and values keep their heads: with grouped queries only these travel. Who moves them is an `Exchange`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch.autograd.function import once_differentiable

_aten = torch.ops.aten


#: Keys and values of a piece in one layer, or their gradients: each `[1, key_value_heads, tokens, head_dim]`.
KeyValue: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class KVExchange(Protocol):
    """What one piece tells and hears of the others of its sequence. A layer is named by its number, from 0."""

    def publish_kv(self, layer: int, kv: KeyValue) -> None:
        """Let later pieces read keys and values. One-sided; a second call for a layer does nothing."""

    def earlier_kv(self, layer: int) -> Iterable[KeyValue]:
        """Yield keys and values of each earlier piece, in order, as soon as they are shown. One-sided, waits."""

    def send_kv_grads(self, layer: int, grads: Sequence[KeyValue]) -> None:
        """Hand each earlier piece, in order, what this one adds to its gradients. One-sided, may wait."""

    def accumulate_kv_grads(self, layer: int, grads: KeyValue) -> KeyValue:
        """Return gradients with what all later pieces have given added to them. One-sided, waits."""


class ContextParallelAttention(torch.autograd.Function):
    """Causal attention of a piece over all tokens of the sequence up to its own."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        layer: int,
        exchange: KVExchange,
    ) -> torch.Tensor:
        """Return the piece's output, like `query`. One-sided, waits for earlier pieces.

        Args:
            ctx: Autograd's.
            query: `[1, heads, tokens, head_dim]`.
            key: `[1, key_value_heads, tokens, head_dim]`.
            value: Like `key`.
            scaling: Factor of the scores; None for one over the root of `head_dim`.
            layer: Number of the layer.
            exchange: Of this piece.
        """
        exchange.publish_kv(layer, (key, value))
        output, lse = _attend(query, key, value, scaling, causal=True)
        joined = output.to(lse.dtype)
        earlier: list[torch.Tensor] = []
        for part in exchange.earlier_kv(layer):
            earlier += part
            joined, lse = _join(joined, lse, *_attend(query, *part, scaling, causal=False))
        output = joined.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse, *earlier)
        ctx.scaling, ctx.layer, ctx.exchange = scaling, layer, exchange
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of query, key and value. One-sided, waits for later pieces."""
        query, key, value, output, lse, *flat = ctx.saved_tensors
        upstream = upstream.contiguous()
        earlier = zip(flat[::2], flat[1::2], strict=True)
        total = torch.zeros_like(query, dtype=lse.dtype)
        gradients: list[KeyValue] = []
        for part in earlier:
            of_query, of_key, of_value = _attend_backward(
                upstream, query, *part, output, lse, ctx.scaling, causal=False
            )
            total += of_query
            gradients.append((of_key, of_value))
        kv_needs_grad = any(ctx.needs_input_grad[1:3])  # else keys and values depend on nothing that is trained
        if kv_needs_grad:
            ctx.exchange.send_kv_grads(ctx.layer, gradients)
        of_query, of_key, of_value = _attend_backward(
            upstream, query, key, value, output, lse, ctx.scaling, causal=True
        )
        total += of_query
        if kv_needs_grad:
            of_key, of_value = ctx.exchange.accumulate_kv_grads(ctx.layer, (of_key, of_value))
        return total.to(query.dtype), of_key, of_value, None, None, None


#: Attend from a piece's tokens to all tokens of the sequence up to their own; see `ContextParallelAttention.forward`. One-sided.
context_parallel_attention: Callable[..., torch.Tensor] = ContextParallelAttention.apply


def _join(
    output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the outputs over two sets of keys, the first of them in the type of the log-sum-exps."""
    both = torch.logaddexp(lse, other_lse)
    first, second = ((each - both).exp()[..., None] for each in (lse, other_lse))
    return output * first + other.to(lse.dtype) * second, both


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp of the scores, `[1, heads, tokens]`, in fp32 or wider."""
    output, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scaling)
    return output, lse


def _attend_backward(
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    scaling: float | None,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the part of these keys in the gradients of query, key and value."""
    gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        upstream, query, key, value, output, lse, 0.0, causal, scale=scaling
    )
    return cast(tuple[torch.Tensor, torch.Tensor, torch.Tensor], gradients)

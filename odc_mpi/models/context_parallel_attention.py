"""Attention for one chunk of a sequence whose other chunks are on other ranks, and a check that a model supports it.

The tokens of a chunk attend causally to the keys of this chunk, and without a mask to the keys of all earlier chunks.
For each of these chunks, one kernel call returns an output and the log-sum-exp of the scores. The outputs are merged
with weights computed from the log-sum-exps, as for blocks in FlashAttention (arXiv 2205.14135, section 3.1) and for
ranks in Ring Attention (arXiv 2310.01889). No mask of size tokens x tokens is needed.

    forward    publish the keys and values of this chunk; attend to them; then attend to each earlier chunk as soon as
               its keys and values are published
    backward   compute the gradients of the earlier chunks' keys and values, and send them; compute the gradients of
               this chunk's keys and values; add the gradients that the later chunks sent

Given the merged output and log-sum-exp, the backward kernel yields the exact gradients for each chunk. With
grouped-query attention, key and value heads are transferred without repetition.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, cast

import torch
import torch.nn.functional as F
import transformers
from torch.autograd.function import once_differentiable

from odc_mpi.errors import UserError, one_line_message
from odc_mpi.models.attention import ContextParallelUnsupportedError, SequenceChunk
from odc_mpi.models.families import rope_types, run_trial, trial_inputs

_aten = torch.ops.aten
#: Types of rotary embeddings whose frequencies depend on the number of tokens in the input.
_LENGTH_ROPES = ("dynamic", "longrope")


class ContextParallelAttention(torch.autograd.Function):
    """Autograd function for the causal attention of a chunk to itself and all earlier chunks of its sequence."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        layer: int,
        exchange: Any,
    ) -> torch.Tensor:
        """Compute the chunk's attention output, shaped like `query`. One-sided; waits for earlier chunks.

        For tensors and `scaling`, see `attention.packed_attention`. Values are shaped like keys. `layer` counts from 0.
        `exchange` transfers keys, values and their gradients; see `comm.context_parallel.kv_exchange`.
        """
        exchange.publish_kv(layer, (key, value))
        output, lse = _attend(query, key, value, scaling, causal=True)
        merged = output.to(lse.dtype)
        earlier: list[torch.Tensor] = []
        for kv in exchange.earlier_kv(layer):
            earlier += kv
            merged, lse = _merge(merged, lse, *_attend(query, kv[0], kv[1], scaling, causal=False))
        output = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse, *earlier)
        ctx.scaling, ctx.layer, ctx.exchange = scaling, layer, exchange
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients of `query`, `key` and `value`. One-sided; waits for later chunks."""
        query, key, value, output, lse, *earlier = ctx.saved_tensors
        upstream = upstream.contiguous()
        query_grad = torch.zeros_like(query, dtype=lse.dtype)
        earlier_grads = []
        for kv in zip(earlier[::2], earlier[1::2], strict=True):
            part, *kv_grads = _attend_backward(upstream, query, *kv, output, lse, ctx.scaling, causal=False)
            query_grad += part
            earlier_grads.append(kv_grads)
        kv_needs_grad = any(ctx.needs_input_grad[1:3])  # else keys and values depend on no trainable parameter
        if kv_needs_grad:
            ctx.exchange.send_kv_grads(ctx.layer, earlier_grads)
        part, *kv_grads = _attend_backward(upstream, query, key, value, output, lse, ctx.scaling, causal=True)
        query_grad += part
        if kv_needs_grad:
            kv_grads = ctx.exchange.accumulate_kv_grads(ctx.layer, kv_grads)
        return query_grad.to(query.dtype), *kv_grads, None, None, None


#: Function with the arguments and result of `ContextParallelAttention.forward`. One-sided.
context_parallel_attention: Callable[..., torch.Tensor] = ContextParallelAttention.apply


def _merge(
    output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention outputs for two sets of keys. `output` and the result have the dtype of the log-sum-exps."""
    both = torch.logaddexp(lse, other_lse)
    first, second = ((each - both).exp()[..., None] for each in (lse, other_lse))
    return output * first + other.to(lse.dtype) * second, both


class _Kernel(Enum):
    """Attention kernels of PyTorch that return the log-sum-exp. The last two are for GPUs."""

    CPU = 0
    FLASH = 1  # FlashAttention, for 16-bit numbers and `head_dim` up to `_FLASH_MAX_HEAD_DIM`
    EFFICIENT = 2  # memory-efficient attention


#: Largest `head_dim` that FlashAttention supports, and the multiple that both kernels for GPUs require.
_FLASH_MAX_HEAD_DIM, _HEAD_DIM_MULTIPLE = 256, 8
#: Memory-efficient attention pads the log-sum-exps of each head with infinity to a multiple of this number.
_LSE_MULTIPLE = 32


def _choose_kernel(query: torch.Tensor) -> _Kernel:
    if query.device.type == "cpu":
        return _Kernel.CPU
    if query.dtype == torch.float32:
        return _Kernel.EFFICIENT
    capability = torch.cuda.get_device_capability(query.device)
    if capability < (8, 0):
        raise UserError(
            f"data.context_parallel: {query.dtype} needs a GPU of compute capability 8.0 or more, got "
            f"{'.'.join(map(str, capability))}: set model.param_dtype to float32, or data.context_parallel to off"
        )
    return _Kernel.FLASH if query.shape[3] <= _FLASH_MAX_HEAD_DIM else _Kernel.EFFICIENT


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention output, and the log-sum-exp of the scores in fp32 or fp64, `[1, heads, tokens]`."""
    kernel, head_dim, num_tokens = _choose_kernel(query), query.shape[3], query.shape[2]
    if kernel is _Kernel.CPU:
        output, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scaling)
        return output, lse
    scaling = head_dim**-0.5 if scaling is None else scaling
    if kernel is _Kernel.FLASH:
        states = map(_pad_head_dim, (query, key, value))
        output, lse, *_ = _aten._scaled_dot_product_flash_attention(*states, 0.0, causal, scale=scaling)
    else:
        states = map(_pad_head_dim, (query, *_repeat_heads(query, key, value)))
        output, lse, *_ = _aten._scaled_dot_product_efficient_attention(*states, None, True, 0.0, causal, scale=scaling)
    return output[..., :head_dim], lse[..., :num_tokens]


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
    """Return the gradients of `query`, `key` and `value`. `output` and `lse` are those merged over all chunks."""
    kernel, head_dim, num_tokens = _choose_kernel(query), query.shape[3], query.shape[2]
    gradients: Sequence[torch.Tensor]
    if kernel is _Kernel.CPU:
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            upstream, query, key, value, output, lse, 0.0, causal, scale=scaling
        )
        return cast(tuple[torch.Tensor, torch.Tensor, torch.Tensor], gradients)
    scaling = head_dim**-0.5 if scaling is None else scaling
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # of the dropout, which is off
    if kernel is _Kernel.FLASH:
        states = map(_pad_head_dim, (upstream, query, key, value, output))
        lengths = num_tokens, key.shape[2]
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            *states, lse.contiguous(), None, None, *lengths, 0.0, causal, seed, seed, scale=scaling
        )
    else:
        repeated = _repeat_heads(query, key, value)
        states = map(_pad_head_dim, (upstream, query, *repeated))
        # The kernel reads the output as `[1, tokens, heads, head_dim]` in memory.
        output = _pad_head_dim(output).transpose(1, 2).contiguous().transpose(1, 2)
        lse = F.pad(lse, (0, -num_tokens % _LSE_MULTIPLE), value=torch.inf)
        needed = [True, True, True, False]
        query_grad, *kv_grads, _ = _aten._scaled_dot_product_efficient_attention_backward(
            *states, None, output, lse, seed, seed, 0.0, needed, causal, scale=scaling
        )
        gradients = query_grad, *(grad.unflatten(1, (key.shape[1], -1)).sum(2) for grad in kv_grads)
    query_grad, key_grad, value_grad = (gradient[..., :head_dim] for gradient in gradients)
    return query_grad, key_grad, value_grad


def _pad_head_dim(states: torch.Tensor) -> torch.Tensor:
    """Append zeros to each row until its length is a multiple of `_HEAD_DIM_MULTIPLE`. They change no score."""
    excess = states.shape[3] % _HEAD_DIM_MULTIPLE
    return F.pad(states, (0, _HEAD_DIM_MULTIPLE - excess)) if excess else states


def _repeat_heads(query: torch.Tensor, *states: torch.Tensor) -> list[torch.Tensor]:
    """Repeat heads of keys and values to as many as `query` has, for a kernel without grouped-query attention."""
    return [x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in states]


def attention_shape(module: transformers.PreTrainedModel, num_tokens: int) -> tuple[int, int]:
    """Check that a model supports context parallelism, and return the shape of its attention.

    The results for a chunk must be the same as in the unsplit sequence. Therefore, every layer must attend causally to
    the full sequence through `packed_attention`, and no other operation may depend on other tokens or the sequence
    length. The check runs a forward pass of `module`, which must be in training mode on the meta device and have no
    adapters. `num_tokens` is the length of the longest sequence.

    Returns:
        The number of layers, and the number of elements in one token's keys and values in one layer (the maximum over
        all layers).

    Raises:
        ContextParallelUnsupportedError: The check failed.
    """
    config = module.config.get_text_config()
    if ropes := sorted(set(rope_types(config.to_dict())) & set(_LENGTH_ROPES)):
        raise ContextParallelUnsupportedError(f"its rotary frequencies depend on the length: {', '.join(ropes)}")
    if getattr(config, "output_router_logits", False):
        raise ContextParallelUnsupportedError("its loss has a term for the balance of experts")
    layers: list[int] = []
    sizes: list[int] = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any, layer: int) -> torch.Tensor:
        layers.append(layer)
        sizes.append((key.numel() + value.numel()) // key.shape[2])
        return torch.empty_like(query)

    try:
        run_trial(module, **trial_inputs([3]), chunk=SequenceChunk(num_tokens, attend))
    except ContextParallelUnsupportedError:
        raise
    except Exception as error:  # for example a module that reads values, see `build`
        raise ContextParallelUnsupportedError(
            f"{type(module).__name__} cannot run on the meta device: {one_line_message(error)}"
        ) from error
    if not layers or layers != list(range(len(layers))):
        raise ContextParallelUnsupportedError(f"expected one attention in each layer, in order, got {layers}")
    return len(layers), max(sizes)

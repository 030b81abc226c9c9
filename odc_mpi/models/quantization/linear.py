"""Linear layers with frozen 4-bit weights in the format of bitsandbytes, dequantized for each product.

A layer stores the n elements of its weight in two arrays of bytes, which are sharded, fetched and cached as such:

    weight          uint8 `[n / 2, 1]`   codes of two consecutive elements in each byte, the first in the high four bits
    weight_scales   uint8 `[k]`          the following arrays, which are float32 except for the codes:
        values         [16]              value of each code
        without double quantization:
        scales         [n / 64]          scale of each block of 64 elements
        with double quantization:
        scale_values   [256]             value of each code of a scale
        mean           [1], zeros [7]    mean of the scales
        ranges         [n / 64 / 256]    largest deviation from the mean in each group of 256 blocks, or the rest
        scale_codes    [n / 64] uint8    code of each scale, which is value * range + mean

An element is the value of its code * the scale of its block. The bytes are those that bitsandbytes computes and stores
(QLoRA, arXiv 2305.14314), with all scales in one array. Autograd saves the two parameters, not the dequantized weight;
the unit can therefore be resharded after its forward pass, and is fetched again for its backward pass.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from odc_mpi.errors import UserError
from odc_mpi.models.heads import prediction_task
from odc_mpi.models.quantization.library import cpu_kernel

#: Elements per block, and blocks per range of scales, as bitsandbytes chooses them by default.
BLOCK_NUMEL, RANGE_BLOCKS = 64, 256
#: Name of the parameter with the scales of `weight`.
SCALES = "weight_scales"
#: Number of float32 elements before the ranges, with double quantization.
_CODES, _HEADER = 16, 16 + 256 + 8
#: Elements that are dequantized at a time, so that intermediate tensors stay in a core's cache.
_CHUNK_NUMEL = 1 << 17


class QuantizedLinear(nn.Linear):
    """Linear layer with a frozen 4-bit weight, whose parameters are on the meta device.

    Args:
        linear: Layer to replace, whose bias is kept. Its weight has a multiple of 64 elements.
        quant_type: Code of the elements: "nf4" or "fp4".
        double_quant: True if the scales are quantized, too.
        stored_dtype: Dtype of the weight before quantization, to which dequantized elements are rounded.

    Attributes:
        num_bytes: Number of bytes in which the weight is stored.
    """

    def __init__(self, linear: nn.Linear, *, quant_type: str, double_quant: bool, stored_dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.quant_type, self.double_quant, self.stored_dtype = quant_type, double_quant, stored_dtype
        num_blocks = self.numel // BLOCK_NUMEL
        num_double_bytes = 4 * (_HEADER + -(-num_blocks // RANGE_BLOCKS)) + num_blocks
        self.weight = _bytes(self.numel // 2, 1)
        self.weight_scales = _bytes(num_double_bytes if double_quant else 4 * (_CODES + num_blocks))
        self.num_bytes = self.weight.numel() + self.weight_scales.numel()

    @property
    def numel(self) -> int:
        """Number of elements in the weight."""
        return self.in_features * self.out_features

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of `x` and the dequantized weight, plus the bias, in the dtype of `x`."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        product: torch.Tensor = _Product.apply(x, self.weight, self.weight_scales, self)
        return product if bias is None else product + bias

    def dequantize(self, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, `[out_features, in_features]`, rounded to `stored_dtype` and converted to `dtype`.

        `weight` and `scales` are the contents of `weight` and `weight_scales`.
        """
        shape = self.out_features, self.in_features
        if weight.is_meta:  # an estimate of memory
            return torch.empty(shape, dtype=dtype, device=weight.device)
        block_scales = self._block_scales(scales)
        if weight.device.type == "cpu" and (kernel := cpu_kernel()):
            # As a single row: the kernel confuses the scales of rows that are no multiple of a block.
            row = kernel(weight, block_scales, BLOCK_NUMEL, self.quant_type, (1, self.numel), self.stored_dtype)
            return row.view(shape).to(dtype)
        out = torch.empty(shape, dtype=dtype, device=weight.device)
        values = scales[: 4 * _CODES].view(torch.float32)
        # The values of both elements of a byte, as the bits of an int64, so that one lookup finds both.
        pairs = torch.cartesian_prod(values, values).view(torch.int64).view(-1)
        chunks = zip(
            weight.view(-1).split(_CHUNK_NUMEL // 2),
            block_scales.split(_CHUNK_NUMEL // BLOCK_NUMEL),
            out.view(-1).split(_CHUNK_NUMEL),
            strict=True,
        )
        for codes, scale, target in chunks:
            elements = pairs.index_select(0, codes.int()).view(torch.float32).view(-1, BLOCK_NUMEL)
            target = target.view(-1, BLOCK_NUMEL)
            if dtype is self.stored_dtype:
                torch.mul(elements, scale[:, None], out=target)
            else:
                target.copy_(elements.mul_(scale[:, None]).to(self.stored_dtype))
        return out

    def _block_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Return the scale of each block, float32 `[numel / 64]`."""
        if not self.double_quant:
            return scales[4 * _CODES :].view(torch.float32)
        num_blocks = self.numel // BLOCK_NUMEL
        floats, codes = scales[:-num_blocks].view(torch.float32), scales[-num_blocks:]
        values, mean, ranges = floats[_CODES : _CODES + 256], floats[_CODES + 256], floats[_HEADER:]
        deviations = values.index_select(0, codes.int())
        return deviations.mul_(ranges.repeat_interleave(RANGE_BLOCKS)[: codes.numel()]).add_(mean)


class _Product(torch.autograd.Function):
    """Product with a dequantized weight. Saves the bytes of the weight, and dequantizes again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, layer: QuantizedLinear) -> Any:
        ctx.save_for_backward(weight, scales)
        ctx.layer = layer
        return F.linear(x, layer.dequantize(weight, scales, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        weight, scales = ctx.saved_tensors
        return gradient @ ctx.layer.dequantize(weight, scales, gradient.dtype), None, None, None


def linear_layers(module: transformers.PreTrainedModel) -> list[str]:
    """Return the names of the layers that transformers quantizes by default: linear ones, except for the head."""
    head, new_head = module.get_output_embeddings(), prediction_task(type(module).__name__).new_head
    # A subclass, such as the routers of Llama 4, returns more than a product.
    linear = [name for name, layer in module.named_modules() if type(layer) is nn.Linear and layer is not head]
    return [name for name in linear if name != new_head]


def replace_layer(module: nn.Module, name: str, **options: Any) -> None:
    """Replace a linear layer with a quantized one. Raise `UserError` if its size is not supported."""
    linear = cast(nn.Linear, module.get_submodule(name))
    if linear.weight.numel() % BLOCK_NUMEL:
        raise UserError(
            f"model.load_in_4bit: expected linear layers with a multiple of {BLOCK_NUMEL} weights, got {name} with "
            f"{linear.weight.numel()}: set it to false"
        )
    module.set_submodule(name, QuantizedLinear(linear, **options))


def quantized_layers(module: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """Yield the dotted names and the layers of a module that are quantized."""
    yield from ((name, layer) for name, layer in module.named_modules() if isinstance(layer, QuantizedLinear))


def largest_numel(module: nn.Module) -> int:
    """Return the number of elements in the largest quantized weight of a module; 0 if there is none."""
    return max((layer.numel for _, layer in quantized_layers(module)), default=0)


def hidden_numel(module: nn.Module) -> int:
    """Return by how much the elements of a module's weights outnumber those of its parameters."""
    return sum(layer.numel - layer.num_bytes for _, layer in quantized_layers(module))


def _bytes(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8, device="meta"), requires_grad=False)

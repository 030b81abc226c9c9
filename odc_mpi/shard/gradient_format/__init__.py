"""Number formats in which gradients are pushed and summed: floating-point or 64-bit fixed-point."""

from collections.abc import Sequence

import torch

from odc_mpi.comm.layout import FlatLayout
from odc_mpi.shard.gradient_format.base import GradientFormat as GradientFormat
from odc_mpi.shard.gradient_format.fixed_point import FixedPointGradients
from odc_mpi.shard.gradient_format.floating_point import FloatGradients


def make_gradient_format(dtype: torch.dtype, layouts: Sequence[FlatLayout]) -> GradientFormat:
    """Create the number format for a gradient dtype: floating-point, or fixed-point if the dtype is an integer type."""
    if dtype.is_floating_point:
        return FloatGradients(dtype)
    return FixedPointGradients({index: layout.numel for index, layout in enumerate(layouts) if layout.trainable})

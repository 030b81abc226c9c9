"""The numbers that gradients are pushed and added up as: floating-point, or 64-bit fixed-point."""

from collections.abc import Sequence

import torch

from odc_mpi.shard.elements.base import Elements as Elements
from odc_mpi.shard.elements.fixed_point import FixedPoint
from odc_mpi.shard.elements.floating_point import FloatingPoint
from odc_mpi.shard.layout import FlatLayout


def make_elements(dtype: torch.dtype, layouts: Sequence[FlatLayout]) -> Elements:
    """Return the numbers that gradients are added up as. Local.

    Args:
        dtype: Of the elements of gradients on the way.
        layouts: The arrays.
    """
    if dtype.is_floating_point:
        return FloatingPoint(dtype)
    return FixedPoint({index: layout.numel for index, layout in enumerate(layouts) if layout.trainable})

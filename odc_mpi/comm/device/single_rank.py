"""Stores for a single rank with a GPU. Shards are full arrays in device memory, and nothing is communicated.

A fetch returns a view of the array. Gradients are added to their sums on the current stream, in whose order the
optimizer runs after the backward pass and before the next forward pass.
"""

import torch
from typing_extensions import override

from odc_mpi.comm.device.device import Device, zeros
from odc_mpi.comm.transport import Access, GradientStore, ParameterStore, PrivateShards
from odc_mpi.comm.work import FetchWork, Work


class _DeviceShards(PrivateShards):
    def __init__(self, dtype: torch.dtype, device: Device) -> None:
        super().__init__(dtype)
        self._device = device


class SingleRankParameters(_DeviceShards, ParameterStore):
    """Single-rank parameter store that keeps full arrays in device memory."""

    access = Access.KEEP

    @override
    def allocate(self) -> None:
        shards = (zeros(self._device, layout.shard_numel, layout.dtype or self.dtype) for layout in self.layouts)
        self._shards = dict(enumerate(shards))

    @override
    def fetch(self, index: int) -> FetchWork:
        return FetchWork(self._shards[index][: self.layouts[index].numel], Work())

    @override
    def release(self, fetched: torch.Tensor) -> None:
        pass  # the memory remains allocated


class SingleRankGradients(_DeviceShards, GradientStore):
    """Single-rank gradient store that keeps full arrays in device memory."""

    is_local = True

    @override
    def allocate(self) -> None:
        self._shards = {index: zeros(self._device, numel, self.dtype) for index, numel in self.trainable_numels.items()}

    @override
    def empty(self, num_bytes: int) -> torch.Tensor:
        return self._device.empty(num_bytes)

    @override
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        self._shards[index][start : start + gradient.numel()].add_(gradient)
        return Work()

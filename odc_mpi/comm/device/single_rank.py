"""One rank whose shards are on a device: they are whole arrays, nobody else looks, and nothing travels.

fetch     a view of the array
push      the device adds the gradient, in the order of what it was given to compute
A, B      nothing: the optimizer's work is behind the backward's, and before the next forward's, in the same order
"""

import torch
from typing_extensions import override

from odc_mpi.comm.device.device import Device, zeros
from odc_mpi.comm.shard_storage import ShardStorage
from odc_mpi.comm.transport import Access, GradientStore, ParameterStore
from odc_mpi.comm.work import CompletedWork, FetchWork, Work


class SingleRankParameters(ShardStorage, ParameterStore):
    """Whole arrays of parameters on a device. Making one is local.

    Args:
        dtype: Of the parameters.
        device: Has the memory.
    """

    access = Access.KEEP

    def __init__(self, dtype: torch.dtype, device: Device) -> None:
        super().__init__(dtype)
        self._device = device
        self._arrays: list[torch.Tensor] = []

    @override
    def allocate(self) -> None:
        self._arrays = [zeros(self._device, layout.shard_numel, layout.dtype or self.dtype) for layout in self.layouts]

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._arrays[index]

    @override
    def fetch(self, index: int) -> FetchWork:
        return FetchWork(self._arrays[index][: self.layouts[index].numel], CompletedWork())

    def release(self, fetched: torch.Tensor) -> None:
        """Do nothing: the memory stays."""

    @override
    def free(self) -> None:
        self._arrays.clear()


class SingleRankGradients(ShardStorage, GradientStore):
    """Whole arrays of gradients on a device. Making one is local.

    Args:
        dtype: Of the sums.
        device: Has the memory, and adds.
    """

    pushes_to_peers = False

    def __init__(self, dtype: torch.dtype, device: Device) -> None:
        super().__init__(dtype)
        self._device = device
        self._sums: dict[int, torch.Tensor] = {}

    @override
    def allocate(self) -> None:
        self._sums = {index: zeros(self._device, numel, self.dtype) for index, numel in self.trainable_numels.items()}

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._sums[index]

    @override
    def empty(self, num_bytes: int) -> torch.Tensor:
        return self._device.empty(num_bytes)

    @override
    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Work:
        # One operator of torch's: a kernel of ours takes longer to launch, and has no cast to save here.
        self._sums[index][start : start + gradient.numel()].add_(gradient)
        return CompletedWork()

    @override
    def free(self) -> None:
        self._sums.clear()

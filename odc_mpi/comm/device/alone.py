"""One rank whose shards are on a device: they are whole arrays, nobody else looks, and nothing travels.

fetch     a view of the array
push      the device adds the gradient, in the order of what it was given to compute
A, B      nothing: the optimizer's work is behind the backward's, and before the next forward's, in the same order
"""

from collections.abc import Sequence

import torch

from odc_mpi.comm.device.device import Device
from odc_mpi.comm.transport import Done, Fetch, Footprint, GradientStore, Host, Layout, ParameterStore, Pending


class OwnParameters(ParameterStore, Host):
    """Whole arrays of parameters on a device. Making one is local.

    Args:
        dtype: Of the parameters.
        device: Has the memory.
    """

    copies = False
    stays = True

    def __init__(self, dtype: torch.dtype, device: Device) -> None:
        super().__init__(dtype)
        self._device = device
        self._layouts: tuple[Layout, ...] = ()
        self._arrays: list[torch.Tensor] = []

    @property
    def layouts(self) -> Sequence[Layout]:  # noqa: D102
        return self._layouts

    def plan(self, layouts: Sequence[Layout]) -> Footprint:  # noqa: D102
        self._layouts = tuple(layouts)
        return Footprint()

    def allocate(self) -> None:  # noqa: D102
        self._arrays = [zeros(self._device, layout.shard_numel, self.dtype) for layout in self._layouts]

    def shard(self, index: int) -> torch.Tensor:  # noqa: D102
        return self._arrays[index]

    def fetch(self, index: int) -> Fetch:  # noqa: D102
        return Fetch(self._arrays[index][: self._layouts[index].numel], Done())

    def start_fetch(self, index: int, buffer: torch.Tensor) -> Pending:  # noqa: D102
        buffer.copy_(self._arrays[index][: buffer.numel()])
        return Done()

    def release(self, fetched: torch.Tensor) -> None:
        """Do nothing: the memory stays. Local."""

    def free(self) -> None:  # noqa: D102
        self._arrays.clear()


class OwnGradients(GradientStore, Host):
    """Whole arrays of gradients on a device. Making one is local.

    Args:
        dtype: Of the sums.
        device: Has the memory, and adds.
    """

    def __init__(self, dtype: torch.dtype, device: Device) -> None:
        super().__init__(dtype)
        self._device = device
        self._layouts: Sequence[Layout] = ()
        self._sums: dict[int, torch.Tensor] = {}

    def plan(self, layouts: Sequence[Layout]) -> Footprint:  # noqa: D102
        self._layouts = layouts
        return Footprint()

    def allocate(self) -> None:  # noqa: D102
        trained = {index: layout.shard_numel for index, layout in enumerate(self._layouts) if layout.trainable}
        self._sums = {index: zeros(self._device, numel, self.dtype) for index, numel in trained.items()}

    def shard(self, index: int) -> torch.Tensor:  # noqa: D102
        return self._sums[index]

    def memory(self, num_bytes: int) -> torch.Tensor:  # noqa: D102
        return self._device.memory(num_bytes)

    def push(self, index: int, gradient: torch.Tensor, start: int = 0) -> Pending:  # noqa: D102
        # One operator of torch's: a kernel of ours takes longer to launch, and has no cast to save here.
        self._sums[index][start : start + gradient.numel()].add_(gradient)
        return Done()

    def free(self) -> None:  # noqa: D102
        self._sums.clear()


def zeros(device: Device, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return memory of a device, `[numel]` of zeros. Local."""
    return device.memory(numel * dtype.itemsize).view(dtype).zero_()

"""Windows over a device's memory: `Win.Create` over what its driver allocated, told to MPI by address.

MPI allocates no memory on devices, so a window there is made over memory that exists. It comes from the driver itself
(`Device.empty_for_windows`): of what memory pools hand out an MPI library may get no handle to show another process, and
then copies through the host, or fails.

Whether an operation on such a window works at all, and for whom it waits, depends on the library: it is used where
`odc-mpi doctor` has seen it work (`stack.device_probe`), or where a person insists. Only what MPI does is ordered by
the window; what the device's streams do is ordered by who uses it (`comm.device.device_stores`).
"""

from functools import partial
from typing import Any

import torch
from mpi4py import MPI

from odc_mpi.comm.device.device import Device
from odc_mpi.comm.windows.rma import Window, WindowFactory
from odc_mpi.runtime.world import World

#: How the elements of a view are called. What is summed has a type; everything else travels as bytes.
_TYPE_CODES: dict[torch.dtype, Any] = {torch.float32: "f", torch.float64: "d", torch.int64: "q", torch.uint8: "B"}


class DeviceWindow(Window):
    """A shard of `[numel]` on every rank, in the memory of a device. Creating and freeing one is collective.

    Args:
        world: The ranks.
        numel: Elements of this rank.
        dtype: Of the elements.
        device: Has the memory.
        same_size: Whether all ranks have as many. Otherwise some may have none.

    Raises:
        AgreedError: A rank has too little memory; on every rank.

    Attributes:
        tensor: This rank's shard, over the window's memory; it is zero when the device has done what it was given.
    """

    def __init__(self, world: World, numel: int, dtype: torch.dtype, device: Device, *, same_size: bool = True) -> None:
        # All hear of it where one has too little memory: in the collective operation it would leave the others waiting.
        self._memory = world.run_on_all(lambda: device.empty_for_windows(numel * dtype.itemsize))
        super().__init__(world, numel, dtype, same_size=same_size)

    def free(self) -> None:
        """End the epoch and let go of the memory, which goes when nobody looks at it any more. Collective."""
        self.tensor = torch.empty(0)
        super().free()
        self._memory = torch.empty(0)  # MPI knows it no more

    def _make(self, world: World, numel: int, dtype: torch.dtype, info: MPI.Info) -> tuple[MPI.Win, torch.Tensor]:
        tensor = self._memory.view(dtype)
        memory = as_mpi_buffer(tensor.view(torch.uint8)) if numel else None
        return MPI.Win.Create(memory, dtype.itemsize, info, world.comm), tensor


def device_windows(device: Device) -> WindowFactory:
    """Return how windows on this rank's device are made."""
    return WindowFactory(partial(DeviceWindow, device=device), as_mpi_buffer, on_host=False)


def as_mpi_buffer(tensor: torch.Tensor) -> memoryview:
    """Tell where a flat tensor's memory is, on whatever device.

    A view of a device's memory is for MPI alone: a program that looked into it would crash.

    Args:
        tensor: `[n]`, contiguous: of float32, float64 or bytes. The view does not keep it.

    Returns:
        A view with a length of n.
    """
    assert tensor.dim() == 1 and tensor.is_contiguous()
    view = memoryview(MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes))  # type: ignore[arg-type]
    return view.cast(_TYPE_CODES[tensor.dtype])

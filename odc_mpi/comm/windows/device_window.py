"""MPI windows in device memory (`Win.Create`).

MPI does not allocate device memory. `Device.empty_for_windows` allocates it directly from CUDA, because memory from a
pool may have no handle that other processes can open. Without one, MPI libraries copy through the host or fail.

Which operations work on such a window, and whether they wait for their target, depends on the MPI library. Device
windows are used where `odc-mpi doctor` has found that they work (`probe.device_probe`) or where the settings require
them. A window orders only MPI operations, so `comm.device.device_stores` synchronizes windows with streams.
"""

from functools import partial

import torch
from mpi4py import MPI
from typing_extensions import override

from odc_mpi.comm.device.device import Device
from odc_mpi.comm.windows.rma import Window, WindowFactory, as_mpi_buffer
from odc_mpi.runtime.world import World


class DeviceWindow(Window):
    """A `Window` in device memory. Construction is collective.

    A kernel on the current stream fills the shard with zeros. Raises `AllRanksUserError` on every rank if any rank has
    too little device memory or cannot import CuPy.
    """

    def __init__(self, world: World, numel: int, dtype: torch.dtype, device: Device, *, same_size: bool = True) -> None:
        # Fail on all ranks, because if only one raised, the others would wait in the collective.
        self._memory = world.run_on_all(lambda: device.empty_for_windows(numel * dtype.itemsize))
        super().__init__(world, numel, dtype, same_size=same_size)

    @override
    def free(self) -> None:
        self._mapped_shards.clear()  # MPI does not own their memory, which remains while other tensors share it
        super().free()
        self._memory = torch.empty(0)

    @override
    def _make(
        self, world: World, numel: int, dtype: torch.dtype, info: MPI.Info
    ) -> tuple[list[MPI.Win], dict[int, torch.Tensor]]:
        tensor = self._memory.view(dtype)
        memory = as_mpi_buffer(tensor.view(torch.uint8)) if numel else None
        return [MPI.Win.Create(memory, dtype.itemsize, info, world.comm)], {world.rank: tensor}


def device_windows(device: Device) -> WindowFactory:
    """Return a factory for windows in the memory of `device`."""
    return WindowFactory(partial(DeviceWindow, device=device), on_host=False)

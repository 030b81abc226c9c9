"""Windows in device memory: MPI windows (`Win.Create`), and memory that the ranks of a node map with CUDA IPC.

MPI does not allocate device memory. `Device.empty_for_windows` allocates it directly from CUDA, because memory from a
pool may have no handle that other processes can open. Without one, MPI libraries copy through the host or fail.

The MPI library determines the operations that work on a `DeviceWindow`, and whether they wait for their target. Device
windows are used where `odc-mpi doctor` has found that they work (`probe.device_probe`) or where the settings require
them. A window orders only MPI operations, so `comm.device.device_stores` synchronizes windows with streams.

MPI does not access a `MappedDeviceWindow`. A rank accesses the memory of other ranks by asynchronous copies on its
device. Between directly connected GPUs, copy engines do this without the multiprocessors. Events order accesses within
a rank, and MPI orders those of several ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mpi4py import MPI
from typing_extensions import override

from odc_mpi.comm.device.device import Device
from odc_mpi.comm.windows.rma import Window, WindowParts, align_up, as_mpi_buffer
from odc_mpi.errors import UserError, one_line_message
from odc_mpi.runtime.world import World

#: The size of a mapped allocation in bytes is a multiple of this. Smaller allocations may share a handle.
GRANULARITY = 2 << 20
#: Number of bytes that each rank writes in a test of mappings.
_TEST_BYTES = 1 << 16


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
    def _make(self, world: World, numel: int, dtype: torch.dtype, info: MPI.Info) -> WindowParts:
        tensor = self._memory.view(dtype)
        memory = as_mpi_buffer(tensor.view(torch.uint8)) if numel else None
        return [MPI.Win.Create(memory, dtype.itemsize, info, world.comm)], {world.rank: tensor}


class MappedDeviceWindow:
    """Zero-filled device memory of ranks on one node, which map each other's shards. Construction is collective.

    Implements the part of the `Window` interface that does not require MPI to access the memory. Raises
    `AllRanksUserError` on every rank if any rank has too little device memory, cannot import CuPy, or cannot map the
    memory of another rank.

    Attributes:
        tensor: This rank's shard, `[numel]` of `dtype`.
    """

    def __init__(self, world: World, numel: int, dtype: torch.dtype, device: Device) -> None:
        self._world, self._device = world, device
        num_bytes = numel * dtype.itemsize
        memory = world.run_on_all(lambda: device.empty_for_windows(align_up(max(1, num_bytes), GRANULARITY)))
        memory.zero_()
        device.record_event().synchronize()
        handles = world.gather_objects(world.run_on_all(lambda: (device.export(memory), num_bytes)))
        self._memory, self._dtype = memory, dtype
        self.tensor = memory[:num_bytes].view(dtype)
        self._mapped: dict[int, torch.Tensor] = {}  # memory of the other ranks, uint8
        try:
            world.run_on_all(lambda: self._map(handles))
        except UserError:
            self.free()
            raise

    def mapped_shard(self, target: int) -> torch.Tensor:
        """Return a view of the shard of rank `target`."""
        return self.tensor if target == self._world.rank else self._mapped[target].view(self._dtype)

    def sync(self) -> None:
        """Do nothing: events and MPI synchronize accesses."""

    def free(self) -> None:
        """Free the memory. Collective. All of this rank's accesses to the window must have completed."""
        self.tensor = torch.empty(0)
        for mapped in self._mapped.values():
            self._device.unmap(mapped)
        self._mapped.clear()
        # Memory that another rank maps must not be freed.
        self._world.wait_collective(self._world.comm.Ibarrier(), "freeing a window on GPUs")
        self._memory = torch.empty(0)

    def _map(self, handles: list[tuple[bytes, int]]) -> None:
        for rank, (handle, num_bytes) in enumerate(handles):
            if rank != self._world.rank:
                self._mapped[rank] = self._device.map(handle, num_bytes)


def mapping_error(world: World, device: Device) -> str | None:
    """Return the reason why ranks cannot map each other's device memory, or None if they can. Collective.

    The result is the same on all ranks. Every rank writes to the memory of all ranks, then reads and checks it.
    """
    if world.num_nodes > 1:
        return "ranks are on several nodes"
    try:
        window = MappedDeviceWindow(world, _TEST_BYTES * world.size, torch.uint8, device)
    except UserError as error:
        return str(error)
    try:
        world.run_on_all(lambda: _write(world, window, device))
        world.run_on_all(lambda: _check(world, window, device))
        reason = None
    except UserError as error:
        reason = str(error)
    window.free()
    return reason


@contextmanager
def _cuda_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise UserError(one_line_message(error)) from None


@_cuda_errors()
def _write(world: World, window: MappedDeviceWindow, device: Device) -> None:
    values = torch.full((_TEST_BYTES,), world.rank + 1, dtype=torch.uint8, device=device.torch_device)
    begin = _TEST_BYTES * world.rank
    for target in range(world.size):
        device.copy(
            window.mapped_shard(target)[begin : begin + _TEST_BYTES], values, device.record_event()
        ).synchronize()


@_cuda_errors()
def _check(world: World, window: MappedDeviceWindow, device: Device) -> None:
    expected = torch.arange(1, world.size + 1, dtype=torch.uint8).repeat_interleave(_TEST_BYTES)
    for target in range(world.size):
        received = torch.empty_like(window.tensor)
        device.copy(received, window.mapped_shard(target), device.record_event()).synchronize()
        if not torch.equal(received.cpu(), expected):
            raise UserError(f"mapped GPU memory has wrong data, reading that of rank {target}")

"""Windows in device memory that the ranks of a node map with CUDA IPC, and that MPI does not access.

The ranks must be on one node. A rank reads and writes the memory of other ranks with asynchronous copies of its device.
Between GPUs with a direct connection, copy engines do this without their multiprocessors. Kernels and copies that use
the memory must be synchronized with events, and with other ranks through MPI.
"""

from functools import partial

import torch

from odc_mpi.comm.device.device import Device
from odc_mpi.comm.windows.rma import WindowFactory, align_up
from odc_mpi.errors import UserError
from odc_mpi.runtime.world import World

#: Allocations have a multiple of this size in bytes, because smaller ones may share a handle with others.
GRANULARITY = 2 << 20
#: Number of bytes that each rank writes in a test of mappings.
_TEST_BYTES = 1 << 16


class MappedDeviceWindow:
    """Zero-filled device memory of all ranks on a node, each with a shard, `[numel]` of `dtype`. Collective.

    Raises `AllRanksUserError` on every rank if any rank has too little device memory, cannot import CuPy, or cannot map
    the memory of another rank. A part of the interface of `Window`, which does not use MPI.

    Args:
        same_size: True if `numel` is the same on all ranks.

    Attributes:
        tensor: This rank's shard, `[numel]` of `dtype`.
    """

    def __init__(self, world: World, numel: int, dtype: torch.dtype, device: Device, *, same_size: bool = True) -> None:
        self._world, self._device = world, device
        num_bytes = numel * dtype.itemsize
        memory = world.run_on_all(lambda: device.empty_for_windows(align_up(max(1, num_bytes), GRANULARITY)))
        memory.zero_()
        device.record_event().synchronize()
        handles = world.gather_objects(world.run_on_all(lambda: (device.export(memory), num_bytes)))
        self._memory = memory
        self._mapped: dict[int, torch.Tensor] = {world.rank: memory[:num_bytes]}
        world.run_on_all(lambda: self._map(handles))
        self._shards = {rank: mapped.view(dtype) for rank, mapped in self._mapped.items()}
        self.tensor = self._shards[world.rank]

    def mapped_shard(self, target: int) -> torch.Tensor:
        """Return a view of the shard of rank `target`."""
        return self._shards[target]

    def sync(self) -> None:
        """Do nothing: events and MPI synchronize accesses."""

    def free(self) -> None:
        """Free the memory. Collective. Accesses of other ranks must have ended."""
        self.tensor = torch.empty(0)
        self._shards.clear()
        for rank, mapped in self._mapped.items():
            if rank != self._world.rank:
                self._device.unmap(mapped)
        self._mapped.clear()
        # Memory that another rank maps must not be freed.
        self._world.wait_collective(self._world.comm.Ibarrier(), "freeing a window on GPUs")
        self._memory = torch.empty(0)

    def _map(self, handles: list[tuple[bytes, int]]) -> None:
        for rank, (handle, num_bytes) in enumerate(handles):
            if rank != self._world.rank:
                self._mapped[rank] = self._device.map(handle, num_bytes)


def mapped_device_windows(device: Device) -> WindowFactory:
    """Return a factory for windows in the memory of `device` that the ranks of a node map."""
    return WindowFactory(partial(MappedDeviceWindow, device=device), on_host=False)


def mapping_error(world: World, device: Device) -> str | None:
    """Return the reason that ranks cannot map each other's device memory, or None if they can. Collective.

    The result is the same on all ranks. Every rank writes to the memory of all ranks, reads it, and checks the data.
    """
    if world.num_nodes > 1:
        return "ranks are on several nodes"
    try:
        window = MappedDeviceWindow(world, _TEST_BYTES * world.size, torch.uint8, device)
    except UserError as error:
        return str(error)
    own = torch.full((_TEST_BYTES,), world.rank + 1, dtype=torch.uint8, device=device.torch_device)
    begin = _TEST_BYTES * world.rank
    for target in range(world.size):
        device.copy(window.mapped_shard(target)[begin : begin + _TEST_BYTES], own, device.record_event()).synchronize()
    world.wait_collective(world.comm.Ibarrier(), "testing mappings of GPU memory")
    expected, wrong = torch.arange(1, world.size + 1, dtype=torch.uint8).repeat_interleave(_TEST_BYTES), []
    for target in range(world.size):
        received = torch.empty_like(window.tensor)
        device.copy(received, window.mapped_shard(target), device.record_event()).synchronize()
        wrong += [] if torch.equal(received.cpu(), expected) else [f"rank {world.rank} reads that of rank {target}"]
    found = [error for errors in world.gather_objects(wrong) for error in errors]
    window.free()
    return f"mapped GPU memory has wrong data ({found[0]})" if found else None

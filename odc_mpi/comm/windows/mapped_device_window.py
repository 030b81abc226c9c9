"""Device-memory windows that the ranks of a node map with CUDA IPC. MPI does not access them.

A rank accesses the memory of other ranks by asynchronous copies on its device. Between directly connected GPUs, copy
engines do this without the multiprocessors. Events order accesses within a rank, and MPI orders those of several ranks.
"""

from collections.abc import Callable
from functools import partial

import torch

from odc_mpi.comm.device.device import Device
from odc_mpi.comm.windows.rma import WindowFactory, align_up
from odc_mpi.errors import UserError, one_line_message
from odc_mpi.runtime.world import World

#: Allocations have a multiple of this size in bytes, because smaller ones may share a handle with others.
GRANULARITY = 2 << 20
#: Number of bytes that each rank writes in a test of mappings.
_TEST_BYTES = 1 << 16


class MappedDeviceWindow:
    """Zero-filled device memory of all ranks on a node, each with a shard, `[numel]` of `dtype`. Collective.

    Implements the part of the interface of `Window` that needs no MPI access to the memory. `same_size` is ignored.
    Raises `AllRanksUserError` on every rank if any rank has too little device memory, cannot import CuPy, or cannot map
    the memory of another rank.

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
        self.tensor = self._mapped[world.rank].view(dtype)
        self._shards = {world.rank: self.tensor}
        try:
            world.run_on_all(lambda: self._map(handles))
        except UserError:
            self.free()
            raise
        self._shards |= {rank: mapped.view(dtype) for rank, mapped in self._mapped.items() if rank != world.rank}

    def mapped_shard(self, target: int) -> torch.Tensor:
        """Return a view of the shard of rank `target`."""
        return self._shards[target]

    def sync(self) -> None:
        """Do nothing: events and MPI synchronize accesses."""

    def free(self) -> None:
        """Free the memory. Collective. All accesses of this rank to the window must have completed."""
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
    """Return the reason that prevents ranks from mapping each other's device memory, or None. Collective.

    The result is the same on all ranks. Every rank writes to the memory of all ranks, then reads and checks it.
    """
    if world.num_nodes > 1:
        return "ranks are on several nodes"
    try:
        window = MappedDeviceWindow(world, _TEST_BYTES * world.size, torch.uint8, device)
    except UserError as error:
        return str(error)
    errors = [_access_error(lambda: _write(world, window, device))]
    world.wait_collective(world.comm.Ibarrier(), "testing mappings of GPU memory")
    errors.append(_access_error(lambda: _check(world, window, device)))
    found = [error for of_rank in world.gather_objects(errors) for error in of_rank if error]
    window.free()
    return found[0] if found else None


def _access_error(access: Callable[[], None]) -> str | None:
    try:
        access()
    except (UserError, RuntimeError) as error:
        return one_line_message(error)
    return None


def _write(world: World, window: MappedDeviceWindow, device: Device) -> None:
    own = torch.full((_TEST_BYTES,), world.rank + 1, dtype=torch.uint8, device=device.torch_device)
    begin = _TEST_BYTES * world.rank
    for target in range(world.size):
        device.copy(window.mapped_shard(target)[begin : begin + _TEST_BYTES], own, device.record_event()).synchronize()


def _check(world: World, window: MappedDeviceWindow, device: Device) -> None:
    expected = torch.arange(1, world.size + 1, dtype=torch.uint8).repeat_interleave(_TEST_BYTES)
    for target in range(world.size):
        received = torch.empty_like(window.tensor)
        device.copy(received, window.mapped_shard(target), device.record_event()).synchronize()
        if not torch.equal(received.cpu(), expected):
            raise UserError(f"mapped GPU memory has wrong data (rank {world.rank} reading the memory of rank {target})")

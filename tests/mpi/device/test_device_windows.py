"""Windows over a device's memory, with host memory in its place: passed to MPI by address, moved by MPI alone."""

import pytest
import torch
from late_device import LateDevice

from odc_mpi.comm.windows.device_window import DeviceWindow, MappedDeviceWindow, mapping_error
from odc_mpi.errors import AllRanksUserError, UserError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]


@pytest.fixture
def device():
    return LateDevice()


def test_memory_stays_allocated_while_it_is_referenced(world, device):
    window = DeviceWindow(world, 1000, torch.float32, device)
    kept = window.tensor[10:]
    kept.fill_(3)
    window.free()
    assert kept.sum() == 2970


def test_too_little_memory_on_one_rank_is_an_error_on_all(world, device):
    def empty_for_windows(num_bytes):
        if world.rank == world.size - 1:
            raise UserError("there is too little memory")
        return device.empty(num_bytes)

    device.empty_for_windows = empty_for_windows
    with pytest.raises(AllRanksUserError, match="there is too little memory"):
        DeviceWindow(world, 1000, torch.float32, device)


def test_ranks_map_each_others_memory(world, device):
    window = MappedDeviceWindow(world, 1000, torch.float32, device)
    assert not window.tensor.any()
    window.tensor.fill_(world.rank + 1)
    world.gather_objects(None)
    for rank in range(world.size):
        assert (window.mapped_shard(rank) == rank + 1).all() and len(window.mapped_shard(rank)) == 1000
    world.gather_objects(None)
    window.free()
    assert mapping_error(world, device) is None
    assert not device._mapped


def test_memory_that_cannot_be_mapped_is_not_used(world, device, monkeypatch):
    def map_memory(handle, num_bytes):
        raise UserError("CUDA cannot map it")

    if world.rank == world.size - 1:
        monkeypatch.setattr(device, "map", map_memory)
    error = mapping_error(world, device)
    assert (error is None) == (world.size == 1) and (error is None or "CUDA cannot map it" in error)
    assert not device._mapped, "what other ranks mapped is unmapped"


def test_mappings_of_other_memory_are_noticed(world, device, monkeypatch):
    if world.rank == world.size - 1:
        monkeypatch.setattr(device, "map", lambda handle, num_bytes: device.empty_for_windows(num_bytes))
        monkeypatch.setattr(device, "unmap", lambda memory: None)
    error = mapping_error(world, device)
    assert (error is None) == (world.size == 1) and (error is None or "wrong data" in error)

"""Windows over a device's memory, with host memory in its place: passed to MPI by address, moved by MPI alone."""

import pytest
import torch
from late_device import LateDevice

from odc_mpi.comm.windows import rma
from odc_mpi.comm.windows.device_window import DeviceWindow, MappedDeviceWindow, mapping_error
from odc_mpi.comm.windows.rma import as_mpi_buffer
from odc_mpi.errors import AllRanksUserError, UserError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]


def synchronize(world):
    world.gather_objects(None)


@pytest.fixture
def device():
    return LateDevice()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numel", [1, 33, 4097])
def test_writes_of_owners_and_peers_are_read(world, device, dtype, numel, monkeypatch):
    monkeypatch.setattr(rma, "MAX_MESSAGE_NUMEL", 100)  # long messages are cut
    window = DeviceWindow(world, numel, dtype, device)
    assert window.tensor.data_ptr() in device.device_memory and not window.tensor.any()
    values = (torch.arange(numel) % 100 + world.rank).to(dtype)
    window.tensor.copy_(values)
    window.sync()
    synchronize(world)
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    buffer = torch.full((numel,), -1, dtype=dtype)
    window.get(after, as_mpi_buffer(buffer.view(torch.uint8)))
    window.flush()
    assert torch.equal(buffer, (torch.arange(numel) % 100 + after).to(dtype))
    synchronize(world)
    window.put(after, 0, as_mpi_buffer(values.view(torch.uint8)))
    window.flush(after)
    synchronize(world)
    window.sync()
    assert torch.equal(window.tensor, (torch.arange(numel) % 100 + before).to(dtype))
    assert window.mapped_shard(world.rank) is window.tensor
    window.free()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_accumulated_values_of_all_ranks_are_summed(world, device, dtype, monkeypatch):
    monkeypatch.setattr(rma, "MAX_MESSAGE_NUMEL", 100)
    numel = 1001
    window = DeviceWindow(world, numel, dtype, device)
    values = torch.arange(numel).to(dtype)
    synchronize(world)
    for target in range(world.size):
        window.accumulate_messages(as_mpi_buffer(values), [(target, 1, (numel - 1, 1)), (target, numel, (0, numel))])
    window.flush_local()
    window.flush()
    synchronize(world)
    window.sync()
    assert torch.equal(window.tensor, world.size * values)
    window.free()


def test_a_rank_may_have_nothing(world, device):
    window = DeviceWindow(world, 10 if world.rank == 0 else 0, torch.float32, device, same_size=False)
    synchronize(world)  # until the owner has cleared it
    ones = torch.ones(5)  # the view does not keep them
    window.accumulate_messages(as_mpi_buffer(ones), [(0, 3, (len(ones), 0))])
    window.flush()
    synchronize(world)
    window.sync()
    if world.rank == 0:
        assert window.tensor.tolist() == [0.0] * 3 + [world.size] * 5 + [0.0] * 2
    window.free()


def test_memory_stays_allocated_while_it_is_referenced(world, device):
    window = DeviceWindow(world, 1000, torch.float32, device)
    kept = window.tensor[10:]
    kept.fill_(3)
    window.free()
    assert kept.sum() == 2970


def test_too_little_memory_on_one_rank_is_an_error_on_all(world, device):
    def window_memory(num_bytes):
        if world.rank == world.size - 1:
            raise UserError("there is too little memory")
        return device.empty(num_bytes)

    device.empty_for_windows = window_memory
    with pytest.raises(AllRanksUserError, match="there is too little memory"):
        DeviceWindow(world, 1000, torch.float32, device)


def test_ranks_map_each_others_memory(world, device):
    window = MappedDeviceWindow(world, 1000, torch.float32, device)
    assert not window.tensor.any()
    window.tensor.fill_(world.rank + 1)
    synchronize(world)
    for rank in range(world.size):
        assert (window.mapped_shard(rank) == rank + 1).all() and len(window.mapped_shard(rank)) == 1000
    synchronize(world)
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

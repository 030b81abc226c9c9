"""Windows over a device's memory, with host memory in its place: passed to MPI by address, moved by MPI alone."""

import pytest
import torch
from late_device import LateDevice

from odc_mpi.comm.windows.device_window import DeviceWindow
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
    def window_memory(num_bytes):
        if world.rank == world.size - 1:
            raise UserError("there is too little memory")
        return device.empty(num_bytes)

    device.empty_for_windows = window_memory
    with pytest.raises(AllRanksUserError, match="there is too little memory"):
        DeviceWindow(world, 1000, torch.float32, device)

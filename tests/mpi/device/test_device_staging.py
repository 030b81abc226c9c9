"""Training on a device, with host memory in its place: through pinned memory to windows and back."""

import pytest
import torch
from late_device import LateDevice
from small_training import assert_like_plain, configure

from odc_mpi import api
from odc_mpi.comm.factory import staged, window_transport
from odc_mpi.comm.layout import FlatLayout, ParameterSpec

pytestmark = pytest.mark.mpi


@pytest.fixture
def device(monkeypatch):
    made = LateDevice()
    monkeypatch.setattr(api, "find_device", lambda kind, local_rank: made)
    return made


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"comm.prefetch": 0},
        {"comm.prefetch": 2, "model.gradient_checkpointing": "true"},
        {"comm.zero_copy": "off"},
        {"comm.zero_copy": "off", "comm.prefetch": 0},
        {"comm.reduction": "mailbox"},
        {"comm.reduction": "mailbox", "comm.progress": "thread", "comm.zero_copy": "off"},
        {"data.balance": "dynamic", "optim.device": "cuda"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "defaults",
)
def test_losses_and_parameters_equal_a_plain_loop(world, dataset_path, device, changes):
    changes = {key: str(value) for key, value in changes.items()}
    config = configure(dataset_path, **{"run.device": "cuda", "data.balance": "lb_mini"} | changes)
    metrics, _ = assert_like_plain(config, world, like=configure(dataset_path))
    assert device.copies > 5 * len(metrics)


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("registers", [True, False])
def test_a_fetch_is_copied_straight_from_windows_that_the_driver_takes(world, registers):
    device = LateDevice(can_register=registers)
    transport = staged(window_transport(world), device)
    layout = FlatLayout.build("unit", [ParameterSpec("weight", (50, 7), True)], world.size)
    transport.allocate([layout])
    assert bool(device.registered) == registers
    first, last = layout.owned(world.rank)
    transport.parameters.shard(0)[: last - first] = torch.arange(first, last, dtype=torch.float32)
    transport.publish_parameters()
    fetched = transport.parameters.fetch(0).wait()
    assert torch.equal(fetched, torch.arange(350.0))
    # Nothing lies in between: on one node a fetch is a view of the windows.
    assert (transport.storages[-1].pool.peak_bytes == 0) == registers
    transport.parameters.release(fetched)
    transport.close()
    assert device.registered == [], "memory goes after the driver has let go of it"

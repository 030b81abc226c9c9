"""Training on a device, with host memory in its place: through pinned memory to windows and back."""

import numpy as np
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
        {"comm.prefetch": 2, "model.gradient_checkpointing": "true"},
        {"comm.zero_copy": "off", "comm.prefetch": 0},
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
def test_a_fetch_is_copied_straight_from_windows_that_the_driver_takes_and_nothing_stays_in_use(world, registers):
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
    for factor in (1.0, 2.0):
        gradient = torch.full((350,), factor)
        transport.gradients.record_event(gradient)
        transport.gradients.push(0, gradient).wait()
        gradient.fill_(float("nan"))  # it belongs to the computation again
    transport.complete_gradients(np.zeros(1))
    assert (transport.gradients.shard(0)[: last - first] == 3 * world.size).all()
    for store in (transport.parameters, transport.gradients):
        assert not store._pinned.pool._in_use and not len(store._events)
    assert not transport.parameters.buffers._in_use
    with pytest.raises(KeyError):
        transport.gradients.push(0, torch.ones(350))  # nothing says when the device has written it
    transport.close()
    assert device.registered == [], "memory goes after the driver has let go of it"

"""Training on a device, with host memory in its place: through pinned memory to windows and back."""

import pytest
from late_device import LateDevice
from test_parity import assert_close, configure, expected, run

from odc_mpi import api

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
        {"comm.transport": "collective"},
        {"data.balance": "dynamic", "optim.device": "cuda"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "defaults",
)
def test_losses_and_parameters_equal_a_plain_loop(world, dataset_path, device, changes):
    changes = {key: str(value) for key, value in changes.items()}
    config = configure(dataset_path, **{"run.device": "cuda", "data.balance": "lb_mini"} | changes)
    dataset, metrics, state = run(config, world)
    losses, parameters = expected(configure(dataset_path), dataset)
    assert [m["loss"] for m in metrics] == pytest.approx(losses, rel=1e-5)
    assert_close(state, parameters)
    assert device.copies > 5 * len(metrics)

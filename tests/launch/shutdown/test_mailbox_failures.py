"""An owner that never takes what lies in its mailbox: the job ends within the deadline and names it."""

import pytest
from mpi_launch import launch

STUCK = """
import time, torch
from odc_mpi import World
from odc_mpi.comm.reduce.mailbox import MailboxGradientStore
from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.layout import FlatLayout, ParameterSpec
world = World(timeout_s=2)
transport = window_transport(world, reduction=lambda *args: MailboxGradientStore(*args, mailbox_bytes=1000))
transport.allocate([FlatLayout.build("layers.3", [ParameterSpec("weight", (10_000,), True)], world.size)])
if world.rank == 1:
    time.sleep(60)
transport.gradients.push(0, torch.ones(10_000)).wait()
"""


@pytest.mark.library
@pytest.mark.quick
def test_an_owner_that_never_serves_is_named(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(STUCK)
    done = launch(2, path, timeout_s=40)
    assert done.code != 0
    assert "rank 0 on" in done.err
    assert (
        "waited more than 2 s while waiting for room to push the gradient of unit layers.3: it waits for rank 1"
        in done.err
    )
    assert done.seconds < 30

"""Messages between islands that train apart."""

import time

import numpy as np
import pytest

from odc_mpi.comm.islands.messages import MessageWindow
from odc_mpi.comm.windows.rma import Window

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]


def test_no_message_is_announced_before_all_ranks_have_cleared_their_memory(world, monkeypatch):
    open_epochs = Window._open_epochs

    def slow(self, world):
        open_epochs(self, world)
        time.sleep(0.0 if world.rank else 0.5)  # before rank 0 clears its memory

    monkeypatch.setattr(Window, "_open_epochs", slow)
    window = MessageWindow(world, 8)
    window.show(np.full(8, world.rank, np.uint8))
    window._window.flush()
    world.gather_objects(None)
    announced = window._words[: world.size].tolist()
    assert announced == [int(rank != world.rank) for rank in range(world.size)]
    assert window.receive()[:, 0].tolist() == list(range(world.size))
    window.close()

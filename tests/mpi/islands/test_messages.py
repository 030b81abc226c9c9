"""Messages between islands that train apart."""

import time

import numpy as np
import pytest

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.islands.messages import MessageWindow
from odc_mpi.comm.windows.rma import Window

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]


def test_no_message_is_shown_before_all_ranks_have_cleared_their_memory(world, monkeypatch):
    open_epochs = Window._open_epochs

    def slow(self, world):
        open_epochs(self, world)
        time.sleep(0.0 if world.rank else 0.5)  # before rank 0 clears its memory

    monkeypatch.setattr(Window, "_open_epochs", slow)
    islands = Islands(world, 1)
    window = MessageWindow(islands, 8)
    window.show(np.full(8, world.rank + 1, np.uint8))
    received, used = window.receive()
    assert used == list(range(world.size)) and received[:, 0].tolist() == [rank + 1 for rank in used]
    window.close()
    islands.close()

"""Exchange of messages between islands that train separately, and of numbers between all ranks.

The ranks of a column exchange their messages with a non-blocking all-gather, which proceeds while they compute: in the
calls of MPI that they make, or in the progress thread (`comm.progress`).
"""

import numpy as np
import torch
from mpi4py import MPI

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.runtime.world import World

#: Messages are sent in units of this many bytes, so that counts fit into 32 bits.
_UNIT_BYTES = 4096


class OuterExchange:
    """All-gathers within this rank's column of `islands`, and within `world`. Construction is collective.

    At most one all-gather of messages may be in flight.
    """

    def __init__(self, world: World, islands: Islands) -> None:
        self.world, self.islands = world, islands
        self._unit = MPI.BYTE.Create_contiguous(_UNIT_BYTES).Commit()
        with world.collective("duplicating the communicator"):
            self._numbers_comm = world.comm.Dup()
        self._request: MPI.Request | None = None
        self._sent = self._received = np.empty(0, dtype=np.uint8)
        self._num_bytes = 0
        self._is_open = True
        world.on_close(self.close)

    def start(self, message: torch.Tensor) -> None:
        """Start gathering the messages of this rank's column, `[n]` uint8, with the same n on all of its ranks.

        Collective in the column, but does not wait. `message` may be reused afterwards.
        """
        assert self._request is None, "an all-gather is in flight"
        self._num_bytes, num_units = message.numel(), -(-message.numel() // _UNIT_BYTES)
        self._sent = np.zeros(num_units * _UNIT_BYTES, dtype=np.uint8)
        self._sent[: self._num_bytes] = message.cpu().numpy()
        self._received = np.empty((self.islands.size, self._sent.size), dtype=np.uint8)
        buffers = ([self._sent, num_units, self._unit], [self._received, num_units, self._unit])
        self._request = self.islands.column.comm.Iallgather(*buffers)

    def wait(self) -> torch.Tensor:
        """Return the messages of this rank's column, `[islands, n]` uint8, once all have arrived. Collective."""
        assert self._request is not None, "no all-gather is in flight"
        self.islands.column.wait_collective(self._request, "receiving the parameters of other islands")
        self._request, self._sent = None, np.empty(0, dtype=np.uint8)
        received, self._received = torch.from_numpy(self._received), np.empty(0, dtype=np.uint8)
        return received[:, : self._num_bytes]

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Gather the values of all ranks of the world, each `[k]` float64, as `[size, k]`. Collective."""
        gathered = np.empty((self.world.size, values.size))
        request = self._numbers_comm.Iallgather(np.ascontiguousarray(values, dtype=np.float64), gathered)
        self.world.wait_collective(request, "synchronizing the islands")
        return gathered

    def close(self) -> None:
        """Free the communicator. Collective. Idempotent. Call this before the islands are closed."""
        if self._is_open:
            self._is_open = False
            self._numbers_comm.Free()
            self._unit.Free()
            self.world.cancel_on_close(self.close)

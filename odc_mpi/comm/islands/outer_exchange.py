"""Exchange of messages between islands that train separately, and of numbers between all ranks.

The ranks of a column exchange their messages with non-blocking all-gathers, which proceed while they compute: in the
calls of MPI that they make, or in the progress thread (`comm.progress`).
"""

import numpy as np
import torch
from mpi4py import MPI

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.runtime.world import World

#: Messages are sent in units of this many bytes, so that counts fit into 32 bits.
_UNIT_BYTES = 4096
#: Messages are divided into at most `_MAX_PIECES` pieces of at least `_MIN_PIECE_UNITS` units. Each arrival of a piece
#: extends the deadline of ranks that wait, so a slow network is not taken for a fault.
_MAX_PIECES, _MIN_PIECE_UNITS = 64, 1024


class OuterExchange:
    """All-gathers within this rank's column of `islands`, and within `world`. Construction is collective."""

    def __init__(self, world: World, islands: Islands) -> None:
        self._world, self._islands = world, islands
        self._unit = MPI.BYTE.Create_contiguous(_UNIT_BYTES).Commit()
        with world.collective("duplicating the communicator"):
            self._numbers_comm = world.comm.Dup()
        self._requests: list[MPI.Request] = []
        self._sent = self._received = np.empty(0, dtype=np.uint8)
        self._num_bytes = 0
        self._is_open = True
        world.on_close(self.close)

    def start(self, message: torch.Tensor) -> None:
        """Start gathering the messages of this rank's column, `[n]` uint8, with the same n on all of its ranks.

        Collective in the column, but does not wait. `message` may be reused afterwards.
        """
        assert not self._requests, "a message is in flight"
        self._num_bytes, num_units = message.numel(), -(-message.numel() // _UNIT_BYTES)
        self._sent = np.zeros(num_units * _UNIT_BYTES, dtype=np.uint8)
        self._sent[: self._num_bytes] = message.cpu().numpy()
        self._received = np.empty((self._islands.size, self._sent.size), dtype=np.uint8)
        piece_units = max(_MIN_PIECE_UNITS, -(-num_units // _MAX_PIECES))
        for first in range(0, num_units, piece_units):
            count = min(piece_units, num_units - first)
            sent = [self._sent[first * _UNIT_BYTES :], count, self._unit]
            offsets = [island * num_units + first for island in range(self._islands.size)]
            received = [self._received, [count] * self._islands.size, offsets, self._unit]
            self._requests.append(self._islands.column.comm.Iallgatherv(sent, received))

    def wait(self) -> torch.Tensor:
        """Return the messages of this rank's column, `[islands, n]` uint8, once all have arrived. Collective."""
        column, num_pieces = self._islands.column, len(self._requests)
        for number, request in enumerate(self._requests, 1):
            piece = f" (piece {number} of {num_pieces})" if num_pieces > 1 else ""
            column.wait_collective(request, f"receiving the parameters of other islands{piece}")
        self._requests, self._sent = [], np.empty(0, dtype=np.uint8)
        received, self._received = torch.from_numpy(self._received), np.empty(0, dtype=np.uint8)
        return received[:, : self._num_bytes]

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Gather the values of all ranks of the world, each `[k]` float64, as `[size, k]`. Collective."""
        gathered = np.empty((self._world.size, values.size))
        request = self._numbers_comm.Iallgather(np.ascontiguousarray(values, dtype=np.float64), gathered)
        self._world.wait_collective(request, "synchronizing the islands")
        return gathered

    def close(self) -> None:
        """Wait for a message in flight, and free the communicator. Collective. Call this before closing the islands."""
        if self._is_open:
            self._is_open = False
            if self._requests:
                self.wait()
            self._numbers_comm.Free()
            self._unit.Free()
            self._world.cancel_on_close(self.close)

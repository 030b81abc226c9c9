"""Messages between islands that do not wait for all of them (`islands.quorum`).

A message n is decided once a quorum of islands has received the messages n of each other, so none of them has to wait
any more. The ranks of an island agree on what they have received by an all-gather over the island, which they repeat
while they wait; its first rank decides (`odc_mpi.islands.quorum`). All islands find the same decision.

An island that a decision leaves out is *late* until a report of it arrives. Nothing is sent to it or read from it,
because over TCP that would not complete while it is stopped. A late island finds the decision before it shows another
message. It asks an island that has gone on for its state, and continues from there; messages that it was reading, whose
slots may have been overwritten meanwhile, are not used.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from typing_extensions import override

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.islands.messages import MessageWindow
from odc_mpi.comm.windows.rma import PrivateWindow, Window
from odc_mpi.islands.quorum import Quorum, mutual

#: Values for an island in the choice of the first rank: it is in the decision, or has the state to continue from.
_MEMBER, _SERVER = 1, 2


class QuorumWindow(MessageWindow):
    """Message window that leaves out late islands. Construction is collective.

    `receive` is collective over the island. If this island is not among those that it returns, call `catch_up`.

    Args:
        quorum: Rule for decisions.
        needs_all: Given the messages of some islands, uint8 `[islands, n]`, returns True to wait for all islands.
        serve: Sends the state of this rank to the given rank of the column, by `reports.send_state`.
    """

    def __init__(
        self,
        islands: Islands,
        max_bytes: int,
        quorum: Quorum,
        needs_all: Callable[[np.ndarray], bool],
        serve: Callable[[int], None],
    ) -> None:
        super().__init__(islands, max_bytes)
        self._quorum, self._needs_all, self._serve = quorum, needs_all, serve
        #: Reads from late ranks, with their memory, that are still in flight.
        self._abandoned: list[tuple[list[MPI.Request], np.ndarray]] = []
        # Other ranks that are not late, that were heard since the last decision, and that know the latest of this rank.
        self._active, self._heard, self._told = set(self._others), set[int](), set[int]()
        # Of the message in flight.
        self._choice: np.ndarray = np.zeros(self.column.size, dtype=np.uint8)
        self._decision: list[int] = []
        self._quorum_since = 0.0

    @property
    def active(self) -> list[int]:
        """Islands that are not late, as far as this rank knows, in ascending order."""
        return sorted({*self._active, self.column.rank})

    @override
    def show(self, message: np.ndarray) -> None:
        self._told = set(self._active)
        self._choice, self._decision, self._quorum_since = np.zeros(self.column.size, dtype=np.uint8), [], 0.0
        super().show(message)

    @override
    def serve(self) -> None:
        self.fetch()
        self._serve_all(_and(self.gather(self.reports.asks)))

    def catch_up(self, like: Sequence[torch.Tensor]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Wait for the state of another island, one that has gone on, and return it. Collective over the island.

        Args:
            like: Tensors with the shapes and dtypes of those in the state.
        """
        [server] = np.flatnonzero(self._choice == _SERVER).tolist()
        self.reports.send([server], asks=True)
        state, tensors = self.reports.receive_state(server, like)
        self._finish(state["decided"], {*state["active"], server})
        return state, tensors

    @override
    def _make_window(self, numel: int) -> Window:
        # Within a node, reads from a `PrivateWindow` are slow with MPICH, which does not need it.
        is_led = self.column.num_nodes > 1 and self.column.mpi_library.startswith("Open MPI")
        return (PrivateWindow if is_led else Window)(self.column, numel, torch.int64)

    @override
    def _audience(self) -> Collection[int]:
        return self._active

    @override
    def _hear(self) -> None:
        for rank in self.reports.receive():
            self._active.add(rank)
            self._heard.add(rank)
            if rank not in self._told:
                self._told.add(rank)
                self.reports.send([rank])

    @override
    def _on_arrival(self) -> None:
        self.reports.send(self._active)

    @override
    def _missing(self) -> Collection[int]:
        return self._active - set(mutual(self._have(), self.column.rank)) or self._active

    @override
    def _decide(self) -> list[int]:
        num_islands = self.column.size
        known = np.concatenate([self._have().ravel(), self.reports.asks, self._choice]).astype(np.uint8)
        gathered = self.gather(known)
        common = _and(gathered[:, :-num_islands])
        self._serve_all(common[-num_islands:])
        # What the first rank has chosen in the former round.
        self._choice = gathered[0, -num_islands:]
        if not self._choice.any() and self.island.rank == 0:
            self._choice = self._choose(common[:-num_islands].reshape(num_islands, num_islands))
            return []
        return np.flatnonzero(self._choice).tolist()

    @override
    def _close(self, islands: list[int]) -> None:
        if self.column.rank in islands:
            self._finish(self._number, {*islands})

    def _have(self) -> np.ndarray:
        return self.reports.have & (self.reports.shown == self._number)[:, None]

    def _choose(self, have: np.ndarray) -> np.ndarray:
        """Return the choice of this island, or zeros to wait. `have` is what all ranks of each island have."""
        decided, choice = self.reports.decided >= self._number, np.zeros(self.column.size, dtype=np.uint8)
        if not self._decision:
            islands = mutual(have, self.column.rank)
            if decided.any():
                self._decision = self._quorum.read(self._number)
            elif self._may_decide(islands):
                self._decision = self._quorum.decide(self._number, islands)
            if self._decision and self.column.rank not in self._decision:
                self._told = set(self._active)
                self.reports.send(self._told)  # so that they answer what they have decided
        if self.column.rank in self._decision:
            choice[self._decision] = _MEMBER
        elif self._decision and decided.any():
            choice[self.reports.decided.argmax()] = _SERVER
        return choice

    def _may_decide(self, islands: list[int]) -> bool:
        if len(islands) == self.column.size:
            return True
        if len(islands) < self._quorum.size or self._needs_all(self._received.view(np.uint8)[islands]):
            return False
        self._quorum_since = self._quorum_since or time.monotonic()
        return self._active <= set(islands) or time.monotonic() > self._quorum_since + self._quorum.grace_s

    def _finish(self, number: int, members: set[int]) -> None:
        """Continue after message `number`, and report that to `members` and to those that were heard meanwhile."""
        me = self.column.rank
        self._abandoned += [(reads, self._received) for reads in self._reads.values() if reads]
        self._abandoned = [each for each in self._abandoned if not all(read.Test() for read in each[0])]
        self._reads = {}
        self.decided = self._number = self.reports.decided[me] = number
        self._told = (members | self._heard) - {me}
        self.reports.send(self._told)
        self._active, self._heard = members - {me}, set()

    def _serve_all(self, asking: np.ndarray) -> None:
        for rank in np.flatnonzero(asking).tolist():
            self.reports.asks[rank] = False
            self._serve(rank)


def _and(gathered: np.ndarray) -> np.ndarray:
    """Return True for each value that is true on all ranks, bool `[n]`, given those of each rank, `[ranks, n]`."""
    return np.logical_and.reduce(gathered, axis=0)

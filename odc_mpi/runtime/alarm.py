"""How a rank that waits in vain ends the job: it asks all others what they are doing, and says who is late."""

import time
from collections.abc import Mapping, Sequence

from mpi4py import MPI

from odc_mpi.runtime.abort import abort
from odc_mpi.runtime.lateness import Status, Wait, compare, say_late, say_status, stranded
from odc_mpi.runtime.status import StatusWindow

#: Between two looks at the others: more than twice as long as a watchdog is idle at most. Who gave no sign of life in
#: this time is stopped or dead, and others whose waits began together with this one have seen theirs expire, too.
SIGN_OF_LIFE_S = 2.5
#: One voice is enough: a rank that knows of a lower one with news of its own gives it this long to end the job.
GIVE_WAY_S = 5.0


class Alarm:
    """Ends the job with a sentence about who is late.

    Args:
        rank: This rank.
        limit: The setting that deadlines come from, by its name.

    Attributes:
        rank: This rank.
        limit: The setting that deadlines come from.
        hosts: Every rank's.
        status: What the ranks tell of themselves; None while there is no window for it, and nobody can be named.
    """

    def __init__(self, rank: int, limit: str = "comm.timeout_s") -> None:
        self.rank = rank
        self.limit = limit
        self.hosts: Sequence[str] = ()
        self.status: StatusWindow | None = None

    def expired(self, wait: Wait, timeout_s: float) -> None:
        """End the job because a wait has outlasted its deadline. One-sided; does not return.

        Args:
            wait: The wait.
            timeout_s: The deadline.
        """
        late = "another rank is late, stuck or dead"
        peers: Mapping[int, Status | None] = {}
        status = self.status
        if status is not None:
            status.page.speak()
            first = status.read()
            time.sleep(SIGN_OF_LIFE_S)
            peers = status.read()
            late = say_late(wait, compare(first, peers), self.hosts, time.time())
        self._end(f"waited more than {timeout_s:g} s while {wait.what}: {late}; the limit is {self.limit}", peers)

    def check_stranded(self) -> None:
        """End the job if others wait for this rank, which is leaving, at a meeting it will not come to. One-sided."""
        if self.status is None:
            return
        peers = self.status.read()
        waiting = stranded(self.status.page.num_meetings, peers)
        if waiting:
            self.status.page.speak()
            rank = waiting[0]
            them = say_status(rank, self.hosts[rank], peers[rank], time.time())
            self._end(f"has left while others wait for it: {them}", peers)

    def _end(self, message: str, peers: Mapping[int, Status | None]) -> None:
        if any(status and status.speaking for rank, status in peers.items() if rank < self.rank):
            time.sleep(GIVE_WAY_S)
        abort(f"rank {self.rank} on {MPI.Get_processor_name()} {message}")

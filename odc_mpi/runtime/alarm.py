"""The end of a job in which a wait outlasts its deadline: the message names the late ranks and their last action."""

import time
from collections.abc import Mapping, Sequence

from mpi4py import MPI

from odc_mpi.runtime.abort import abort
from odc_mpi.runtime.lateness import Status, Wait, compare, say_late, say_status, stranded
from odc_mpi.runtime.status import StatusWindow

#: Seconds between the two readings of the other ranks, more than twice the longest pause of a watchdog. A rank without
#: a heartbeat in this time is stopped or dead, and waits that began together with this one have expired, too.
SIGN_OF_LIFE_S = 2.5
#: One message is enough: a rank gives a lower rank that is about to end the job so many seconds to do so.
GIVE_WAY_S = 5.0


class Alarm:
    """Ends the job with a message that names the late ranks.

    Args:
        rank: This rank.
        limit: The setting that deadlines come from, by its name.

    Attributes:
        rank: This rank.
        limit: The setting that deadlines come from.
        hosts: The host name of every rank.
        status: The status pages of all ranks; None before their window exists: then no rank can be named.
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
        """End the job if others wait in a collective that this rank, which is leaving, will not join. One-sided."""
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

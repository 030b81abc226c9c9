"""Which ranks are late, and the message about them: pure functions of the status of every rank.

Collectives are numbered: every rank goes through the same ones in the same order. So a rank in a collective waits for
the ranks that have arrived at fewer collectives. A fetch or push waits for the owners of the shards that it moves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

#: The most late ranks that a message names; others are counted.
MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class Wait:
    """The operation that a rank waits for.

    Attributes:
        what: The operation in words that follow "while", such as "fetching unit layers.3".
        owners: The ranks whose memory the operation reads or adds to; empty for a collective.
        meeting: The number of the collective, from 1; 0 for other operations, and for collectives of some ranks only.
        among: The ranks that may be late; None for all.
    """

    what: str
    owners: tuple[int, ...] = ()
    meeting: int = 0
    among: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """The status that a rank published last.

    Attributes:
        what: The activity in words that follow "was last seen".
        microbatch: Number of the microbatch in this minibatch, from 1; 0 outside of microbatches.
        num_meetings: Collectives at which the rank has arrived.
        leaving: Whether the rank has begun to close its world.
        speaking: Whether the rank is about to end the job with a message of its own.
        silent: Whether the heartbeat is missing, which the watchdog gives even while the rank computes.
        told_at: Time of publication in seconds since 1970, by the clock of the rank.
        number: Number of the heartbeat.
    """

    what: str
    microbatch: int = 0
    num_meetings: int = 0
    leaving: bool = False
    speaking: bool = False
    silent: bool = False
    told_at: float = 0.0
    number: int = 0


def late_ranks(wait: Wait, peers: Mapping[int, Status | None]) -> list[int]:
    """Return the ranks that a wait waits for, the most suspect first. Local.

    Args:
        wait: The wait.
        peers: All other ranks; None for one that does not answer.
    """
    if wait.among is not None:
        peers = {rank: status for rank, status in peers.items() if rank in wait.among}
    lifeless = [rank for rank, status in peers.items() if status is None or status.silent]
    if wait.meeting:
        late = [rank for rank, status in peers.items() if rank in lifeless or (status and _misses(status, wait))]
    else:
        # Where no owner is named any rank may be the late one: a rank without a heartbeat, if there is one, or one that
        # does something else.
        busy = [rank for rank, status in peers.items() if status and status.what != wait.what]
        late = [rank for rank in peers if rank in wait.owners] or lifeless or busy or list(peers)
    return sorted(late, key=lambda rank: _innocence(peers[rank]))


def elsewhere(wait: Wait, peers: Mapping[int, Status | None]) -> list[int]:
    """Return the ranks that have arrived at as many collectives, and wait in another collective. Local."""
    return [rank for rank, status in peers.items() if status and wait.meeting and not _is_at(status, wait)]


def stranded(meeting: int, peers: Mapping[int, Status | None]) -> list[int]:
    """Return the ranks that would wait for ever for a rank that leaves. Local.

    Args:
        meeting: Number of the last collective of the leaving rank, in which it closes its world.
        peers: As for `late_ranks`. A rank that closes its world later is not stranded.
    """
    return [rank for rank, s in peers.items() if s and s.num_meetings >= meeting and not s.leaving]


def say_late(wait: Wait, peers: Mapping[int, Status | None], hosts: Sequence[str], now: float) -> str:
    """Return the message that names the late ranks and the last activity of each. Local.

    Args:
        wait: The wait that lasts too long.
        peers: As for `late_ranks`.
        hosts: The host name of every rank.
        now: The time in seconds since 1970.
    """
    late = late_ranks(wait, peers)
    if late:
        lead = "late is" if wait.meeting and len(late) == 1 else "late are" if wait.meeting else "it waits for"
    else:
        late, lead = elsewhere(wait, peers), "no rank is late, but elsewhere is"
    if not late:
        return "all ranks have arrived there; the network or the MPI library is stuck"
    named = [say_status(rank, hosts[rank], peers[rank], now) for rank in late[:MAX_NAMED]]
    if len(late) > MAX_NAMED:
        named.append(f"and {len(late) - MAX_NAMED} more")
    return f"{lead} {'; '.join(named)}"


def say_status(rank: int, host: str, status: Status | None, now: float) -> str:
    """Return the last activity of a rank in words. Local."""
    who = f"rank {rank} on {host}"
    if status is None:
        return f"{who}, which does not answer"
    ago = f"{max(0.0, now - status.told_at):.1f} s ago"
    silent = ", and shows no sign of life" if status.silent else ""
    if status.leaving:
        return f"{who}, which left {ago}{silent}"
    where = f"in microbatch {status.microbatch}, " if status.microbatch else ""
    return f"{who}, which was last seen {ago}, {where}{status.what}{silent}"


def compare(first: Mapping[int, Status | None], second: Mapping[int, Status | None]) -> dict[int, Status | None]:
    """Return the first reading, with the ranks marked silent whose heartbeat is the same in the second. Local."""
    seen = dict(first)
    for rank, status in first.items():
        again = second[rank]
        # The watchdog of a rank that is about to speak does nothing else.
        if status and again and not again.speaking:
            seen[rank] = replace(status, silent=status.number == again.number)
    return seen


def _innocence(status: Status | None) -> tuple[int, float]:
    """Order by suspicion: ranks that do not answer, silent ranks, then ranks by the age of their status."""
    if status is None:
        return 0, 0.0
    return 1 if status.silent else 2, status.told_at


def _misses(status: Status, wait: Wait) -> bool:
    return status.num_meetings < wait.meeting or (status.leaving and not _is_at(status, wait))


def _is_at(status: Status, wait: Wait) -> bool:
    # A long text is cut where it is stored.
    return wait.what.startswith(status.what)

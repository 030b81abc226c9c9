"""Who is late, and how to say it: pure rules over what the ranks told of themselves.

Collectives are numbered: every rank goes through the same ones in the same order, so a rank that has arrived at fewer
than another is the one that the other waits for. A fetch or push waits for the owners of what it moves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

#: Late ranks named in a message; the rest is counted.
MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class Wait:
    """What a rank waits for.

    Attributes:
        what: To follow "while", such as "fetching unit layers.3".
        owners: The ranks whose memory it reads or adds to; empty for a collective.
        meeting: The number of the collective, from 1; 0 for anything else.
    """

    what: str
    owners: tuple[int, ...] = ()
    meeting: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank told of itself.

    Attributes:
        what: What it is doing, to follow "was last seen".
        microbatch: The number of its microbatch in this minibatch, from 1; 0 outside of microbatches.
        num_meetings: Collectives at which it has arrived.
        leaving: Whether it has begun to close its world.
        speaking: Whether it is about to end the job with a message of its own.
        silent: Whether it did not give a sign of life, as its watchdog does also while it computes.
        told_at: When it told this, in seconds since 1970 by its own clock.
        number: Of its sign of life.
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
    """Return whom a wait waits for, the most suspect first. Local.

    Args:
        wait: The wait.
        peers: All other ranks; None for one that does not answer.
    """
    lifeless = [rank for rank, status in peers.items() if status is None or status.silent]
    if wait.meeting:
        late = [rank for rank, status in peers.items() if rank in lifeless or (status and _misses(status, wait))]
    else:
        # Where no owner is named any rank may be meant: one without a sign of life, if there is one.
        late = [rank for rank in peers if rank in wait.owners] or lifeless or list(peers)
    return sorted(late, key=lambda rank: _innocence(peers[rank]))


def elsewhere(wait: Wait, peers: Mapping[int, Status | None]) -> list[int]:
    """Return who has arrived at as many collectives, but at another one than this. Local."""
    return [rank for rank, status in peers.items() if status and wait.meeting and not _is_at(status, wait)]


def stranded(meeting: int, peers: Mapping[int, Status | None]) -> list[int]:
    """Return who will wait for ever for a rank that leaves. Local.

    Args:
        meeting: The number of the collective that closes the leaving rank's world, its last.
        peers: As for `late_ranks`. A rank that closes its world as well, later, is not stranded.
    """
    return [rank for rank, s in peers.items() if s and s.num_meetings >= meeting and not s.leaving]


def say_late(wait: Wait, peers: Mapping[int, Status | None], hosts: Sequence[str], now: float) -> str:
    """Say who is late and what each was last doing. Local.

    Args:
        wait: The wait that lasts too long.
        peers: As for `late_ranks`.
        hosts: Every rank's.
        now: In seconds since 1970.
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
    """Say what a rank was last doing. Local."""
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
    """Return a first reading of all ranks with those marked silent that gave no sign of life up to a second. Local."""
    seen = dict(first)
    for rank, status in first.items():
        again = second[rank]
        # The watchdog of a rank that is about to speak does nothing else.
        if status and again and not again.speaking:
            seen[rank] = replace(status, silent=status.number == again.number)
    return seen


def _innocence(status: Status | None) -> tuple[int, float]:
    """Order by suspicion: who does not answer, who is silent, who has not told anything new for long."""
    if status is None:
        return 0, 0.0
    return 1 if status.silent else 2, status.told_at


def _misses(status: Status, wait: Wait) -> bool:
    return status.num_meetings < wait.meeting or (status.leaving and not _is_at(status, wait))


def _is_at(status: Status, wait: Wait) -> bool:
    # A long text is cut where it is stored.
    return wait.what.startswith(status.what)

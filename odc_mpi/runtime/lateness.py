"""Identification of late ranks from the status of all ranks, and messages about them. Does not communicate.

All ranks call the same collectives in the same order, so collectives can be numbered: a rank in a collective waits for
the ranks that have arrived at fewer collectives. A fetch or push waits for the ranks that own the shards.

In all functions, `peers` maps each rank whose status was read to that status, or to None if the rank did not answer.
`now` is the current time in seconds since the epoch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

#: Maximum number of late ranks named in a message. Any further ranks are only counted.
MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class PendingWait:
    """Operation that a rank is waiting for.

    Attributes:
        what: Description of the operation for error messages (see `World`).
        owners: Ranks whose memory the operation accesses. Empty for a collective.
        collective: Number of the collective, starting at 1, or 0 for other operations and for collectives among a
            subset of the ranks.
        among: Ranks that can be late, or None if any rank can be.
    """

    what: str
    owners: tuple[int, ...] = ()
    collective: int = 0
    among: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """Status that a rank last published.

    Attributes:
        what: Activity of the rank. See `World.set_status` for this attribute and for `microbatch`.
        num_collectives: Number of collectives among all ranks at which the rank has arrived.
        finalizing: True if the rank has begun to close its world.
        aborting: True if the rank is about to print a message and abort the job.
        published_at: Time, by the rank's clock, at which it last published its activity, in seconds since the epoch.
        heartbeat_number: Counter that is incremented by every write of the status.
        heartbeat_missing: True if the rank published nothing between two readings (`mark_missing_heartbeats`). The
            watchdog of a live rank publishes a heartbeat at least once per second, even during computation.
    """

    what: str
    microbatch: int = 0
    num_collectives: int = 0
    finalizing: bool = False
    aborting: bool = False
    published_at: float = 0.0
    heartbeat_number: int = 0
    heartbeat_missing: bool = False


def late_ranks(wait: PendingWait, peers: Mapping[int, Status | None]) -> list[int]:
    """Return the ranks that are probably delaying a wait, with the most likely cause first."""
    if wait.among is not None:
        peers = {rank: status for rank, status in peers.items() if rank in wait.among}
    lifeless = [rank for rank, status in peers.items() if status is None or status.heartbeat_missing]
    if wait.collective:
        # A rank that did not answer is unknown: its host may be dead, or it may only be busy.
        late = [rank for rank, s in peers.items() if s and (s.heartbeat_missing or _misses(s, wait))]
    else:
        # Without owners, any rank may be late: ranks without a heartbeat if any, otherwise ranks that do other work.
        busy = [rank for rank, status in peers.items() if status and status.what != wait.what]
        late = [rank for rank in peers if rank in wait.owners] or lifeless or busy or list(peers)
    return sorted(late, key=lambda rank: _suspicion_key(peers[rank]))


def seconds_until_late(wait: PendingWait, peers: Mapping[int, Status | None], now: float, limit_s: float) -> float:
    """Return the number of seconds until a late rank will have published no new activity for `limit_s` seconds.

    Returns 0 if a late rank has reached this limit, if no rank is known to be late, or if a rank did not answer.
    """
    late = [peers[rank] for rank in late_ranks(wait, peers)]
    oldest = min((status.published_at for status in late if status), default=0.0) if all(peers.values()) else 0.0
    return min(limit_s, max(0.0, oldest + limit_s - now))


def stranded_ranks(collective: int, peers: Mapping[int, Status | None]) -> list[int]:
    """Return the ranks that would wait forever if this rank closed its world in collective number `collective`."""
    return [rank for rank, s in peers.items() if s and s.num_collectives >= collective and not s.finalizing]


def format_late_ranks(wait: PendingWait, peers: Mapping[int, Status | None], hosts: Sequence[str], now: float) -> str:
    """Format a message about the late ranks and their last activities."""
    late = late_ranks(wait, peers)
    unanswered = [rank for rank, status in peers.items() if status is None and wait.collective]
    lead = "it waits for "
    if not late and not unanswered:
        lead = "no rank is late, but in another collective is "
        late = [rank for rank, status in peers.items() if status and wait.collective and not _is_at(status, wait)]
    if not late and not unanswered:
        return "all ranks have arrived there; the network or the MPI library is stuck"
    descriptions = [format_status(rank, hosts[rank], peers[rank], now) for rank in late[:MAX_LISTED]]
    descriptions += [
        f"rank {rank} on {hosts[rank]} did not answer" for rank in unanswered[: MAX_LISTED - len(descriptions)]
    ]
    if len(late) + len(unanswered) > MAX_LISTED:
        descriptions.append(f"and {len(late) + len(unanswered) - MAX_LISTED} more")
    return f"{lead if late else ''}{'; '.join(descriptions)}"


def format_status(rank: int, host: str, status: Status | None, now: float) -> str:
    """Describe a rank, its host and its last activity."""
    who = f"rank {rank} on {host}"
    if status is None:
        return f"{who}, which did not answer"
    ago = f"{max(0.0, now - status.published_at):.1f} s ago"
    no_heartbeat = ", and shows no sign of life" if status.heartbeat_missing else ""
    if status.finalizing:
        return f"{who}, which left {ago}{no_heartbeat}"
    where = f"in microbatch {status.microbatch}, " if status.microbatch else ""
    return f"{who}, which was last seen {ago}, {where}{status.what}{no_heartbeat}"


def mark_missing_heartbeats(
    first: Mapping[int, Status | None], second: Mapping[int, Status | None]
) -> dict[int, Status | None]:
    """Return the first of two readings, with `heartbeat_missing` set where `heartbeat_number` is the same in both.

    If a rank answered only in the second reading, its status is taken from that reading. Aborting ranks are not marked.
    """
    result = {rank: status or second[rank] for rank, status in first.items()}
    for rank, status in first.items():
        later = second[rank]
        # The watchdog of a rank that is about to abort sends no heartbeats.
        if status and later and not later.aborting:
            result[rank] = replace(status, heartbeat_missing=status.heartbeat_number == later.heartbeat_number)
    return result


def _suspicion_key(status: Status | None) -> tuple[int, float]:
    """Return a sort key: first ranks that did not answer, then those without a heartbeat, then by age of the status."""
    if status is None:
        return 0, 0.0
    return 1 if status.heartbeat_missing else 2, status.published_at


def _misses(status: Status, wait: PendingWait) -> bool:
    return status.num_collectives < wait.collective or (status.finalizing and not _is_at(status, wait))


def _is_at(status: Status, wait: PendingWait) -> bool:
    # A long text is truncated in the status page.
    return wait.what.startswith(status.what)

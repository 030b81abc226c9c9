from dataclasses import replace

import pytest

from odc_mpi.runtime.lateness import (
    MAX_LISTED,
    PendingWait,
    Status,
    format_late_ranks,
    format_status,
    late_ranks,
    mark_missing_heartbeats,
    seconds_until_late,
    stranded_ranks,
)

SYNCHRONIZING = "synchronizing at gradients_complete"
HOSTS = [f"host{rank // 2}" for rank in range(40)]


def at(num_collectives, what=SYNCHRONIZING, **others):
    return replace(Status(what, num_collectives=num_collectives, published_at=100.0), **others)


AT_7 = PendingWait(SYNCHRONIZING, collective=7)
SILENT = {"heartbeat_missing": True}
LEAVING = at(7, "leaving", finalizing=True)
OLD = {0: at(3), 1: at(3, published_at=50.0)}
BUSY, THERE = at(5, "forward of unit x"), at(3, "gathering from all ranks")


@pytest.mark.parametrize(
    ("wait", "peers", "late"),
    [
        # Ranks without heartbeat are named first, then those that were seen last long ago.
        (AT_7, {0: at(6, "x", published_at=90.0), 1: at(7, published_at=95.0, **SILENT), 2: at(7),
                3: at(6, "y", published_at=80.0), 5: None}, [1, 3, 0]),
        # Who leaves is late elsewhere, but not where all leave.
        (AT_7, {1: LEAVING, 2: at(7)}, [1]),
        (PendingWait("leaving", collective=7), {1: LEAVING, 2: at(6)}, [2]),
        # A fetch waits for its owners only. Where none is named, who shows no life is late, or else anybody.
        (PendingWait("fetching unit x", owners=(0, 1)), OLD | {2: None, 3: at(3)}, [1, 0]),
        (PendingWait("closing"), OLD, [1, 0]),
        (PendingWait("closing"), OLD | {2: None, 3: at(3, **SILENT)}, [2, 3]),
        # Ranks missing from a collective of some.
        (PendingWait("gathering from all ranks", among=(1, 2, 3)), {0: BUSY, 2: THERE, 3: BUSY, 4: THERE}, [3]),
    ],
)  # fmt: skip
def test_who_is_late(wait, peers, late):
    assert late_ranks(wait, peers) == late


def test_a_rank_that_did_not_answer_is_named_but_not_called_late():
    wait, late = AT_7, at(6, "x", published_at=99.0)
    said = format_late_ranks(wait, {0: late, 1: at(7), 5: None}, HOSTS, now=100.0)
    assert said == "it waits for rank 0 on host0, which was last seen 1.0 s ago, x; rank 5 on host2 did not answer"
    assert format_late_ranks(wait, {1: at(7), 5: None}, HOSTS, now=100.0) == "rank 5 on host2 did not answer"
    for num_late, last in ((1, " did not answer"), (20, "s ago, x")):
        peers = dict.fromkeys(range(num_late), late) | dict.fromkeys(range(num_late, 40))
        said = format_late_ranks(wait, peers, HOSTS, now=100.0)
        assert said.startswith("it waits for rank 0 ") and said.count("rank ") == MAX_LISTED
        assert said.endswith(f"{last}; and {40 - MAX_LISTED} more")


@pytest.mark.parametrize(
    ("peers", "seconds"),
    [
        ({1: at(7, published_at=0.0), 2: at(6, published_at=99.0)}, 59.0),
        ({1: at(6, published_at=70.0), 2: at(6, published_at=99.0)}, 30.0),
        ({1: at(6, published_at=99.0), 2: at(6, published_at=30.0)}, 0.0),
        ({1: at(6, published_at=99.0), 2: None}, 0.0),
        ({1: at(6, published_at=200.0)}, 60.0),
        ({1: at(7, published_at=99.0)}, 0.0),
    ],
    ids=["one reports", "the one that reported first counts", "one is silent", "no answer", "clock ahead", "none late"],
)
def test_a_rank_is_late_if_it_has_reported_nothing_for_the_limit(peers, seconds):
    assert seconds_until_late(AT_7, peers, now=100.0, limit_s=60.0) == seconds


def test_no_rank_is_blamed_if_all_have_arrived():
    said = "all ranks have arrived there; the network or the MPI library is stuck"
    assert format_late_ranks(PendingWait("ä" * 500, collective=7), {1: at(7, "ä" * 100)}, HOSTS, now=100.0) == said
    some = PendingWait("gathering from all ranks", among=(1,))
    assert format_late_ranks(some, {0: BUSY, 2: THERE}, HOSTS, now=100.0).startswith("all ranks have")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (None, "which did not answer"),
        (at(6, "leaving", finalizing=True), "which left 5.0 s ago"),
        (at(6, "leaving", finalizing=True, heartbeat_missing=True), "which left 5.0 s ago, and shows no sign of life"),
        (at(6, "x", heartbeat_missing=True), "which was last seen 5.0 s ago, x, and shows no sign of life"),
        (at(6, "x", published_at=107.0), "which was last seen 0.0 s ago, x"),
    ],
    ids=["unanswered", "left", "left and silent", "silent", "clock ahead"],
)
def test_description_of_a_rank(status, said):
    assert format_status(3, "hostB", status, now=105.0) == f"rank 3 on hostB, {said}"


def test_a_heartbeat_is_missing_if_two_readings_are_equal():
    first = dict.fromkeys(range(5), at(6, heartbeat_number=4)) | {3: None}
    second = {0: at(7, heartbeat_number=5), 1: at(6, heartbeat_number=4), 3: at(6, heartbeat_number=1), 4: None}
    second[2] = at(6, heartbeat_number=4, aborting=True)
    seen = mark_missing_heartbeats(first, second)
    assert [rank for rank, status in seen.items() if status is None or status.heartbeat_missing] == [1]
    assert seen[3] == second[3], "it answered only the second time"
    assert seen[0] is not None and seen[0].num_collectives == 6, "what a rank did when the deadline passed counts"


def test_who_waits_for_one_that_leaves_is_stranded():
    peers = {0: at(7), 1: at(6, "forward of unit x"), 2: LEAVING, 4: at(8, "after a broadcast"), 5: None}
    peers[3] = at(9, "freeing the windows", finalizing=True)
    assert stranded_ranks(7, peers) == [0, 4]

"""The probe separates one-sided operations from those that wait, on real windows of both kinds."""

from dataclasses import replace

import pytest
from mpi4py import MPI

from odc_mpi.api import decide_for
from odc_mpi.errors import AllRanksUserError
from odc_mpi.probe import cache, operations, probe
from odc_mpi.probe.decision import decide
from odc_mpi.probe.report import INCONCLUSIVE, OPERATIONS

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]


def over_own_memory(world, values):
    """A window over memory that the process had before: in both libraries a Get then waits for its target."""
    return [MPI.Win.Create(values, 1, MPI.INFO_NULL, world.comm)], operations.Buffer(values)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("budget", [probe.QUICK, probe.SELF_TEST], ids=["quick", "self-test"])
def test_a_window_whose_operations_wait(world, monkeypatch, budget):
    monkeypatch.setattr(probe, "allocate", over_own_memory)
    report = probe.probe(world, budget)
    assert report.problems == ()
    assert decide(report).progress.value == "thread"
    for name in ("get", "accumulate", "put", "fetch_and_op"):
        operation = getattr(report.peers.same_node, name)
        assert operation.one_sided is False, name
        assert (operation.gb_per_s is None) == (budget is probe.SELF_TEST and name != "fetch_and_op")


@pytest.mark.mpi(min_size=2)
def test_other_nodes_are_read_over_what_a_node_shares(world, monkeypatch):
    """Of a peer that is taken for one of another node: over such a window a Get from the same node waits."""
    monkeypatch.setattr(probe, "find_pairs", lambda nodes: {"other_node": (0, 1)})
    report = probe.probe(world, probe.QUICK)
    assert report.problems == ()
    found = report.peers.other_node
    assert found.get.one_sided is False and found.get.gb_per_s > 0
    assert found.put.one_sided is found.accumulate.one_sided is found.fetch_and_op.one_sided is True


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", OPERATIONS)
def test_wrong_data_is_reported(world, monkeypatch, name):
    """The first operation of this kind has no effect; all ranks get the error, and the others are still tried."""
    run, skipped = operations.ProbeLink._run, []

    def forgetful(self, tried, num_bytes):
        # A small one that is skipped would be made up for by the next, but for sums and tickets.
        if tried == name and (num_bytes >= 1 << 20 or (name == "fetch_and_op" and not skipped)):
            skipped.append(num_bytes)
            self.received.fill(7, num_bytes)
        else:
            run(self, tried, num_bytes)

    monkeypatch.setattr(operations.ProbeLink, "_run", forgetful)
    report = probe.probe(world, probe.QUICK)
    problems = [problem for problem in report.problems if INCONCLUSIVE not in problem]  # on a busy machine
    assert problems == [f"same_node {name}: received data differs from what was sent"]
    answered = {other for other in OPERATIONS if getattr(report.peers.same_node, other).idle_s is not None}
    assert answered == set(OPERATIONS) - {name}


@pytest.mark.mpi(min_size=2)
def test_a_stale_value_is_refused_before_training(world, monkeypatch, tmp_path):
    """One read returns what was in the buffer before. No library here does so, hence a fake."""
    get, stale = operations.ProbeLink.get, []

    def stale_once(self, num_bytes):
        if num_bytes == 4096 and not stale:  # a size that only this trial uses
            stale.append(num_bytes)
        else:
            get(self, num_bytes)

    monkeypatch.setattr(operations.ProbeLink, "get", stale_once)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = r"^Get with a peer on the same node delivers wrong data .* \(a read returned an old value .*\): use .*$"
    with pytest.raises(AllRanksUserError, match=words):
        decide_for(world)
    assert len(world.gather_objects(stale)[0]) == 1
    assert probe.cached_or_new_report(world).problems == (), "the failure was cached"


@pytest.mark.mpi(min_size=2)
def test_a_counter_that_get_accumulate_reads_wrongly_is_reported(world, monkeypatch):
    monkeypatch.setattr(operations.ProbeLink, "_read_counter", lambda self: None)
    report = probe.probe(world, probe.QUICK)
    assert list(report.problems) == ["same_node fetch_and_op: received data differs from what was sent"]


@pytest.mark.mpi(min_size=2)
def test_a_listener_gets_every_attempt(world):
    messages = []
    report = probe.probe(world, probe.QUICK, on_message=lambda report, doing: messages.append((report, doing)))
    assert report == world.gather_objects(report)[0], "all ranks have the same report"
    assert report.shared_memory.readable and report.shared_memory.contiguous
    tried = [doing for _, doing in messages]
    assert tried == ["shared_memory", "window", *(f"same_node {name}" for name in OPERATIONS), None]
    assert messages[3][0].peers.same_node.get.one_sided is True
    assert messages[3][0].peers.same_node.put.one_sided is None


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        ([0], {}),
        ([0, 0, 0], {"same_node": (0, 1)}),
        ([0, 1], {"other_node": (0, 1)}),
        ([0, 1, 0, 1], {"same_node": (0, 2), "other_node": (0, 1)}),
        ([0, 1, 1], {"same_node": (1, 2), "other_node": (0, 1)}),
    ],
)
def test_pairs(nodes, wanted):
    assert probe.find_pairs(nodes) == wanted


def test_a_kept_report_serves_all_ranks(world, shared_dir, tmp_path, monkeypatch):
    # Only rank 0's file counts: the others have another place, and nothing in it.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = probe.cached_or_new_report(world)
    assert all(found.get.gb_per_s is None for found in first.results().values()), "more than the self-test of one node"
    files = list(cache.cache_directory().glob("*.json"))
    assert len(files) == (1 if world.rank == 0 else 0)
    assert replace(probe.cached_or_new_report(world), shm_bytes=None) == replace(first, shm_bytes=None)
    fast = probe.cached_or_new_report(world, with_speeds=True).results()
    assert all(found.get.gb_per_s for found in fast.values()), "a self-test served a device"
    probed = first.with_problem("probed", "it was")
    monkeypatch.setattr(probe, "probe", lambda *_: probed)
    assert probe.cached_or_new_report(world).problems == ()
    with monkeypatch.context() as patch:
        patch.setattr(world, "node", world.node + world.rank)
        found = probe.cached_or_new_report(world).problems
        assert (found == ()) == (world.size == 1), "ranks are laid out differently"
    if files:
        files[0].write_text("damaged")
    assert probe.cached_or_new_report(world).problems == probed.problems
    assert probe.cached_or_new_report(world).problems == probed.problems, "a report with problems was kept"

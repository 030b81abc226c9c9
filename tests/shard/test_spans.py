import itertools
import time

import pytest
import torch
from adversary import Adversary
from ranks import RecordingTransport, run_ranks
from torch import nn
from toy_models import INPUT, Layer, Stack

from odc_mpi.shard.activity import ActivityReporter
from odc_mpi.shard.model import ShardedModel
from odc_mpi.shard.spans import ACTIVITIES, SHARDING, SPAN_KINDS, SYNC_POINTS, SpanRecorder


def test_seconds_add_up_whether_spans_are_kept_or_not():
    spans = SpanRecorder()
    began = time.perf_counter() - 2.0
    spans.add("fetch", began)
    assert spans.drain() == [], "not recorded unless enabled"
    spans.start_recording()
    spans.add("fetch", began)
    spans.add("gradients_complete", began + 1.0)
    assert spans.seconds["fetch"] == pytest.approx(4.0, abs=0.1)
    assert spans.seconds["gradients_complete"] == pytest.approx(1.0, abs=0.1)
    assert spans.seconds.keys() == {*SPAN_KINDS, *SHARDING}
    first, second = spans.drain()
    assert (first.kind, first.began) == ("fetch", began)
    assert second.ended - second.began == pytest.approx(1.0, abs=0.1)
    assert spans.drain() == [], "taken once"
    spans.add("parameters_published", began)
    assert [span.kind for span in spans.drain()] == ["parameters_published"], "still kept"


@pytest.mark.parametrize("prefetch", [0, 1])
def test_waits_of_a_model_are_recorded_in_order_and_add_up(prefetch):
    def work(transport):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)).double()
        model = ShardedModel(module, transport, units=[nn.Linear], prefetch=prefetch)
        before = dict(model.spans.seconds)
        model.spans.start_recording()
        with model.minibatch():
            assert model.gather_values([transport.group.rank]).tolist() == [[0.0], [1.0]]
            model(torch.ones(2, 4).double()).sum().backward()
        model.clip_grad_norm_(1.0)
        model.publish()
        kept, totals = model.spans.drain(), model.spans.seconds
        for kind in SPAN_KINDS[: -len(ACTIVITIES)]:
            seconds = sum(s.ended - s.began for s in kept if s.kind == kind)
            assert seconds == pytest.approx(totals[kind] - before[kind], abs=1e-9) and seconds > 0
        assert [span.kind for span in kept][-3:] == list(SYNC_POINTS[1:])
        assert all(a.began <= a.ended <= b.began for a, b in itertools.pairwise(kept))
        assert model.usage.boundary_wait_s == sum(totals[point] for point in SYNC_POINTS)
        model.close()

    run_ranks(2, work, transport=Adversary)


# The activity that a rank publishes


class StatusRecorder(RecordingTransport):
    """Records the published status."""

    def set_status(self, what: str, microbatch: int = 0) -> None:
        statuses.append((microbatch, what))


statuses: list[tuple[int, str]] = []
END = [(0, "completing its fetches and pushes"), (0, "flushing gradients")]


def run(work: object) -> list[tuple[int, str]]:
    """Return the status after the last `statuses.clear()`, except for the end of the minibatch."""
    statuses.clear()
    run_ranks(1, work, transport=StatusRecorder)
    return [status for status in statuses if status not in END]


def test_units_and_microbatches_are_published() -> None:
    def work(transport: RecordingTransport) -> None:
        model = ShardedModel(Stack(4).double(), transport, units=[Layer])
        for _ in range(2):  # each minibatch counts from one
            statuses.clear()
            with model.minibatch():
                for _ in range(2):
                    model(INPUT).sum().backward()
            model.publish()

    activities = run(work)
    for microbatch in (1, 2):
        in_microbatch = [what for number, what in activities if number == microbatch and "fetching" not in what]
        layers = [f"layers.{i}" for i in range(4)]
        forwards = [f"forward of unit {name}" for name in ("(root)", *layers)]
        backwards = [f"backward of unit {name}" for name in ("(root)", *layers[::-1], "(root)")]
        assert in_microbatch == forwards + backwards
    fetched = [what for number, what in activities if number == 1 and what.startswith("fetching")]
    assert fetched[:3] == ["fetching unit (root)", "fetching unit layers.0", "fetching unit layers.1"]
    assert {number for number, _ in activities} == {1, 2}


def test_the_same_status_is_not_published_twice() -> None:
    def work(transport: RecordingTransport) -> None:
        activity = ActivityReporter(transport.group)
        activity.start_minibatch()
        for _ in range(2):
            activity.start_microbatch()
            for _ in range(3):
                activity.update("forward of", "a")
        activity.finish_minibatch()
        activity.update("forward of", "a")

    assert run(work) == [(1, "forward of unit a"), (2, "forward of unit a"), (0, "using unit a")]

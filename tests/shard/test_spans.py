import itertools
import time

import pytest
import torch
from ranks import LateTransport, run_ranks
from torch import nn

from odc_mpi.shard.model import ShardedModel
from odc_mpi.shard.step_phases import ACTIVITIES, SHARDING, SPAN_KINDS, SYNC_POINTS, SpanRecorder


def test_seconds_add_up_whether_spans_are_kept_or_not():
    spans = SpanRecorder()
    began = time.perf_counter() - 2.0
    spans.add("fetch", began)
    assert spans.drain() == [], "nobody asked for them"
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
            model(torch.ones(2, 4).double()).sum().backward()
        model.clip_grad_norm_(1.0)
        model.publish()
        kept, totals = model.spans.drain(), model.spans.seconds
        for kind in SPAN_KINDS[: -len(ACTIVITIES)]:
            seconds = sum(s.ended - s.began for s in kept if s.kind == kind)
            assert seconds == pytest.approx(totals[kind] - before[kind], abs=1e-9) and seconds > 0
        assert [span.kind for span in kept][-3:] == list(SYNC_POINTS)
        assert all(a.began <= a.ended <= b.began for a, b in itertools.pairwise(kept))
        assert model.usage.boundary_wait_s == sum(totals[point] for point in SYNC_POINTS)
        model.close()

    run_ranks(2, work, transport=LateTransport)

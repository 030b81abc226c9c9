"""Spans that a trace keeps or leaves out, without a run."""

import json
from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pytest

from odc_mpi.data.plan.balance import Plan
from odc_mpi.observe import trace
from odc_mpi.observe.callback import MicrobatchResult, Step
from odc_mpi.observe.trace import TraceCallback
from odc_mpi.shard.spans import SpanRecorder

SINGLE_RANK = SimpleNamespace(rank=0, size=1, gather_objects=lambda value: [value])


def minibatch(*microbatches, pool=()):
    """Of sequences of 10, 20, 30 and 40 tokens."""
    dataset = SimpleNamespace(lengths=np.array([40, 30, 20, 10]))
    return SimpleNamespace(dataset=dataset, indices=np.array([3, 2, 1, 0]), plan=Plan(tuple(microbatches), pool))


def microbatch(kept, num_tokens):
    kept.on_microbatch_end(
        MicrobatchResult(SimpleNamespace(num_input_tokens=num_tokens), 0.0, (), kept._began, perf_counter(), 0.0)
    )


def recorded(tmp_path, num_steps, steps):
    spans = SpanRecorder()
    kept = TraceCallback(SINGLE_RANK, tmp_path, spans, num_steps, max_tokens=80)
    for step in range(1, steps + 1):
        spans.add("fetch", kept._began)
        microbatch(kept, 100 * step)
        spans.add("parameters_published", kept._began)
        kept.on_step_end(Step(step, minibatch(((0,), (1, 2)), (), pool=((3,),)), {}))
    assert kept.on_train_end() == {}
    return json.loads((tmp_path / trace.NAME).read_text())


def test_the_last_minibatches_are_kept(tmp_path):
    content = recorded(tmp_path, num_steps=2, steps=5)
    assert [step["step"] for step in content["steps"]] == [4, 5]
    (local,) = content["steps"][1]["ranks"]
    ((began, ended, tokens),) = local["microbatches"]
    assert tokens == 500 and 0 <= began <= ended <= local["end_s"]
    assert len(local["fetch"]) == len(local["parameters_published"]) == 1 and local["gradients_complete"] == []
    # Microbatches of 10, 50 and 40 tokens in every step of the run.
    tokens = content["tokens_per_microbatch"]
    assert (tokens["first_step"], tokens["last_step"]) == (1, 5)
    counts = {edge: count for edge, count in zip(tokens["edges"], tokens["counts"], strict=False) if count}
    assert counts == {10: 5, 40: 5, 50: 5}
    assert content["max_tokens_per_microbatch"] == tokens["edges"][-1] == 80


def test_nothing_is_kept_or_written_if_nothing_is_asked_for(tmp_path):
    spans = SpanRecorder()
    none = TraceCallback(SINGLE_RANK, tmp_path, spans, 0, max_tokens=80)
    spans.add("fetch", 0.0)
    microbatch(none, 1)
    none.on_step_end(Step(1, minibatch(((0,),)), {}))
    assert spans.drain() == []
    none.on_train_end()
    assert list(tmp_path.iterdir()) == []


def test_of_too_many_spans_the_longest_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "MAX_SPANS", 4)
    monkeypatch.setattr(trace, "MIN_SPANS", 3)
    spans = SpanRecorder()
    kept = TraceCallback(SINGLE_RANK, tmp_path, spans, 1, max_tokens=80)
    for seconds in (5.0, 1.0, 7.0, 3.0, 6.0, 2.0):
        spans.add("fetch", kept._began - seconds)
    kept.on_step_end(Step(1, minibatch(((0,),)), {}))
    kept.on_train_end()
    (local,) = json.loads((tmp_path / trace.NAME).read_text())["steps"][0]["ranks"]
    assert [round(ended - began) for began, ended in local["fetch"]] == [5, 7, 3, 6]
    assert local["left_out_s"]["fetch"] == pytest.approx(3.0, abs=0.1)


def test_a_run_does_not_end_for_a_trace_that_cannot_be_written(tmp_path, capsys):
    spans = SpanRecorder()
    kept = TraceCallback(SINGLE_RANK, tmp_path / "nowhere", spans, 1, max_tokens=80)
    kept.on_step_end(Step(1, minibatch(((0,),)), {}))
    kept.on_train_end()
    assert "WARNING: cannot write" in capsys.readouterr().err

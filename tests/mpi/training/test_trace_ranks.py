"""The trace of a run on two ranks agrees with its metrics."""

import itertools
import json
import math

import pytest
from small_training import configure, train_to_the_end

from odc_mpi.shard.spans import SYNC_POINTS

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2), pytest.mark.slow]


def read_spans(local):
    return sorted(
        (began, ended, kind) for kind in ("fetch", "accumulate", *SYNC_POINTS) for began, ended in local[kind]
    )


def sum_seconds(local, kind, until_s=math.inf):
    return sum(ended - began for began, ended in local[kind] if ended <= until_s)


def test_the_trace_contains_the_waits_of_the_metrics(world, base, dataset_path):
    settings = {"run.trace_steps": 5, "data.balance": "dynamic", "comm.zero_copy": "off", "run.dir": base}
    steps, _ = train_to_the_end(configure(dataset_path, **settings), world)
    trace, summary = (json.loads((base / name).read_text()) for name in ("trace.json", "summary.json"))
    assert [step["step"] for step in trace["steps"]] == [step["step"] for step in steps]
    for traced, output in zip(trace["steps"], steps, strict=True):
        assert len(traced["ranks"]) == 2
        for local in traced["ranks"]:
            spans = read_spans(local)
            assert spans[0][0] >= 0 and spans[-1][1] <= local["end_s"]
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "they do not overlap"
            assert tuple(kind for _, _, kind in spans if kind in SYNC_POINTS) == SYNC_POINTS[1:]
            microbatches = local["microbatches"]
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(microbatches))
            assert not microbatches or microbatches[-1][1] <= local["gradients_complete"][0][0]
        for kind in ("fetch", "accumulate"):
            # The metrics contain the time until the last microbatch is done.
            sums = [
                sum_seconds(local, kind, max([0.0, *(one[1] for one in local["microbatches"])]))
                for local in traced["ranks"]
            ]
            assert sum(sums) / 2 == pytest.approx(output[f"{kind}_wait_s"], abs=1e-4)
        assert sum(one[2] for local in traced["ranks"] for one in local["microbatches"]) == output["num_input_tokens"]
    everyone = [local for step in trace["steps"] for local in step["ranks"]]
    for kind in ("fetch", "accumulate"):
        assert sum(sum_seconds(local, kind) for local in everyone) / 2 == pytest.approx(
            summary[f"{kind}_wait_s"], abs=1e-3
        )
    assert sum(trace["tokens_per_microbatch"]["counts"]) == sum(len(local["microbatches"]) for local in everyone)

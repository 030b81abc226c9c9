"""A minibatch on one rank of the benchmark of schedules, without MPI between ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
from schedule_speed import CollectiveRunner, Runner, measure
from user_errors import refused

from odc_mpi.comm.work import Work
from odc_mpi.data.plan.balance import Plan
from odc_mpi.errors import AllRanksUserError
from odc_mpi.simulate.scenario import Scenario, SimulatedMinibatch

SINGLE_RANK = SimpleNamespace(
    rank=0, size=1, comm=SimpleNamespace(Ibarrier=lambda: None), wait_collective=lambda request, what: None
)


class SilentRunner(CollectiveRunner):
    """Runner that pads like one with collectives, but calls no MPI."""

    def __init__(self):
        Runner.__init__(self, SINGLE_RANK, num_units=2)

    def use(self, unit, sleeper, seconds):
        sleeper.sleep(seconds)

    def push(self, unit):
        return Work()

    def finish(self):
        pass


def test_several_nodes_are_refused():
    """Ranks that sleep on other nodes answer no requests."""
    refused("on one node, got 2", measure, SimpleNamespace(num_nodes=2), Scenario(), 1.0, error=AllRanksUserError)


class LateClock:
    """Clock whose sleeps are a tenth of a millisecond too long, in place of the module `time`."""

    def __init__(self):
        self._now_s = 100.0

    def perf_counter(self):
        return self._now_s

    def sleep(self, seconds):
        self._now_s += seconds + 1e-4


def test_sleeps_are_reported_unscaled_and_without_dummy_microbatches(monkeypatch):
    monkeypatch.setattr("schedule_speed.time", LateClock())
    # Sequences of 20 and 30 s, 10 s more in each microbatch, an empty one too: at a thousandth 30, 10 and 40 ms.
    trial = SimulatedMinibatch(Scenario(overhead_s=10.0), np.array([1, 2]), np.array([20.0, 30.0]), np.ones(1))
    sample = SilentRunner().run(trial, Plan((((0,), (), (1,)),)), scale=1e-3)
    assert sample.busy_s == pytest.approx(0.07)
    assert sum(ended - began for began, ended in sample.slept) == pytest.approx(70, abs=0.3)
    edges = [second for span in sample.slept for second in span]
    assert edges == sorted(edges) and edges[-1] <= sample.end_s * 1e3
    # The pause is the padding between the two, which is not reported.
    assert max(b - a for a, b in zip(edges[1::2], edges[2::2], strict=False)) > 9

"""Parts of the benchmark programs: measurements, losses that count as the same, a rank of the schedules."""

import json
import math
import sys
from types import SimpleNamespace

import bench_report
import numpy as np
import pytest
import rollout_schedules
import schedule_speed
import split_speed
import train_speed
import transport_speed
from measure import DEFAULT_SIZES, entries, interleaved, parse_sizes, ratio, seconds
from mpi_launch import ROOT
from schedule_speed import CollectiveRunner, Runner, measure
from train_speed import TOLERANCE, Round, agreement, deviation
from user_errors import refused, user_error

from odc_mpi.comm.work import Work
from odc_mpi.data.plan.balance import Plan
from odc_mpi.errors import AllRanksUserError
from odc_mpi.formatting import format_size
from odc_mpi.simulate.events import quartiles
from odc_mpi.simulate.scenario import Scenario, SimulatedMinibatch


def test_spread_is_median_and_quartiles():
    assert list(quartiles([5.0, 1.0, 4.0, 2.0, 3.0]).values()) == [2.0, 3.0, 4.0]
    assert quartiles([7.0]) == {"low": 7.0, "median": 7.0, "high": 7.0}


def test_variants_take_turns():
    order = []
    results = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b") or 2}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert results == {"a": [None] * 3, "b": [2] * 3}


def test_operations_take_turns_and_the_end_is_timed_too(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("measure.perf_counter", lambda: now[0])
    order = []

    def take(name, time_s):
        order.append(name)
        now[0] += time_s

    operations = [lambda: take("x", 1.0), lambda: take("y", 2.0)]
    assert seconds(operations, 5, lambda: take("end", 3.0)) == (1 + 2 + 1 + 2 + 1 + 3) / 5
    assert order == ["x", "y", "x", "y", "x", "end"]


def test_ratio_is_of_rounds_not_of_medians():
    """A slow round slows both: the ratio does not see it."""
    assert ratio([1.0, 10.0, 2.0], [2.0, 20.0, 4.0]) == 0.5
    assert ratio([4.0, 1.0, 1.0], [2.0, 2.0, 1.0]) == 1.0


def test_speeds_are_of_the_whole_unit_and_ratios_of_the_same_round():
    times = {"copy": [1e-3, 2e-3], "fetch": [20e-3, 40e-3]}
    found = entries(times, 10**8, of_copy=lambda _: "copy", of_other=lambda name: "other")
    assert found["copy"]["gb_per_s"] == {"low": 62.5, "median": 75.0, "high": 87.5}
    assert found["fetch"]["seconds"]["median"] == pytest.approx(30e-3)
    assert (found["fetch"]["of_copy"], found["fetch"]["of_other"]) == (0.05, None)


def test_sizes():
    assert parse_sizes("64K,1M, 2g ,12,65536") == [65536, 1 << 20, 2 << 30, 12]
    assert parse_sizes(",".join(map(format_size, parse_sizes(DEFAULT_SIZES)))) == parse_sizes(DEFAULT_SIZES)
    assert (parse_sizes(DEFAULT_SIZES)[0], parse_sizes(DEFAULT_SIZES)[-1]) == (64 << 10, 256 << 20)


@pytest.mark.parametrize("text", ["", "0", "-4", "K", "1.5M", "64K,", "64X", "7", "1KK", "²K", "1e6", "9" * 5000])
def test_sizes_that_are_none(text):
    refused("--sizes: expected sizes such as", parse_sizes, text)


@pytest.mark.parametrize(
    ("program", "options", "words"),
    [
        (transport_speed, "--sizes 64X", "--sizes: expected sizes such as"),
        (transport_speed, "--size 1M", "unrecognized arguments: --size 1M: see transport_speed.py --help"),
        (transport_speed, "--timeout-s -1", "--timeout-s"),
        (schedule_speed, "--lengths longaling", "longalign"),
        (schedule_speed, "--step-s 0", "--step-s: expected seconds from 0.001 to 3600, got '0'"),
        (schedule_speed, "--step-s inf", "--step-s"),
        (schedule_speed, "--ranks 3", "unrecognized arguments: --ranks 3"),
        (train_speed, "--steps 0", "--steps: expected an integer above 0"),
        (train_speed, "--repeats 100000000000000000000", "--repeats: expected an integer above 0, at most"),
        (split_speed, "--length 5000", "--length: expected a number from 0 to 4096, got 5000"),
        (bench_report, "/nowhere.json", "/nowhere.json: expected a run directory or a JSON file"),
    ],
)
def test_user_errors_are_one_line(monkeypatch, capsys, program, options, words):
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{program.__name__}.py", *options.split()])
    user_error(capsys, words=words, main=lambda _: program.main())


def test_programs_call_main():
    """Short runs do so themselves (tests/mpi/benchmarks/test_program_runs.py)."""
    for path in (ROOT / "benchmarks").glob("*.py"):
        *lines, condition, call = path.read_text().splitlines()
        if any(line.startswith("def main(") for line in lines):
            assert condition == 'if __name__ == "__main__":' and call in ("    main()", "    sys.exit(main())"), path


def test_rollout_schedules(monkeypatch, capsys):
    """No schedule exceeds the bound, and sharing pays."""
    words = ["rollout_schedules.py", "--speed-variation", "0.1", "--minibatches", "6", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    rollout_schedules.main()
    result = json.loads(capsys.readouterr().out)
    barrier, pool, on_demand, stale_1, stale_2, bound = result["speedup"].values()
    assert barrier == 1 < pool < on_demand < bound and on_demand > max(1.13, 0.97 * bound)
    assert 1.1 * on_demand < stale_1 < stale_2
    assert result["idle_fraction"]["collective/barrier"] == pytest.approx(0.14, abs=0.03)
    assert 0.4 < result["generation_fraction"] < 0.75


def rounds(*losses):
    return [Round(1.0, 10, list(losses[:1])), Round(1.0, 10, list(losses[1:]))]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_is_infinitely_far_off(bad):
    good = rounds(2.0, 4.0, 1.0)
    for position in range(3):
        losses = [2.0, 4.0, 1.0]
        losses[position] = bad
        assert deviation(rounds(*losses), good) == deviation(good, rounds(*losses)) == math.inf
        assert deviation(rounds(*losses), rounds(*losses)) == math.inf


def test_contenders_that_do_not_agree_are_named():
    all_rounds = {"plain": rounds(2.0, 4.0, 1.0), "near": rounds(2.0, 4.016, 1.0), "far": rounds(2.0, 4.0, 1.02)}
    assert agreement(all_rounds, "plain", 0.03) == pytest.approx({"plain": 0.0, "near": 0.004, "far": 0.02})
    assert agreement({**all_rounds, "near": rounds(2.0, 4.0, 1 + 4e-7), "far": all_rounds["plain"]}, "plain", TOLERANCE)
    for changes, words, tolerance in (
        ({"near": rounds(2.0, 4.0, 1 + 1e-4), "far": all_rounds["plain"]}, "differ by 0.0001 ", TOLERANCE),
        ({}, "of far and plain differ by 0.02", 0.005),
        ({"near": rounds(2.0, math.nan, 1.0)}, "a loss of near or plain is not finite", 0.03),
    ):
        refused(words, agreement, all_rounds | changes, "plain", tolerance, error=AllRanksUserError)


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

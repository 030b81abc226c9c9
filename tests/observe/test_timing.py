"""Times of steps and of microbatches on a device, whose events have times that the test chooses; waits of islands."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from odc_mpi.observe import timing
from odc_mpi.observe.callback import Step
from odc_mpi.observe.timing import DeviceMicrobatchTimer, IslandMetrics, StepTimes


def test_times_of_a_step(monkeypatch):
    """Two ranks, of which this one waits one second for the other inside of a microbatch."""
    now, waited_s, seconds = [0.0], [0.0], {"fetch": 5.0, "accumulate": 6.0}
    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])
    model = SimpleNamespace(device=torch.device("cpu"), spans=SimpleNamespace(seconds=seconds))
    times, step = StepTimes(SimpleNamespace(size=2), model, lambda: waited_s[0]), Step(1, None, {})
    with times.measure(step.metrics):
        now[0] = 1.0  # the minibatch is drawn
        times.on_step_begin(step)
        times.microbatches.begin()
        now[0], waited_s[0], seconds["fetch"], seconds["accumulate"] = 4.0, 1.0, 5.5, 7.0
        [result] = times.microbatches.end("microbatch", torch.tensor([0.5, 7.0]))
        times.on_microbatch_end(result)
        mine = dict(zip(times.gathered_names, times.local_values(), strict=True))
        others = {"busy_s": 4.0, "fetch_s": 0.0, "accumulate_s": 0.0, "microbatches": 3.0}
        times.on_gathered(step, SimpleNamespace(per_rank=lambda name: np.array([mine[name], others[name]])))
        now[0] = 10.0
    assert (result.loss, result.statistics, result.began, result.ended, result.busy_s) == (0.5, [7.0], 1.0, 4.0, 2.0)
    step.metrics["num_input_tokens"] = 500
    times.on_step_end(step)
    assert step.metrics == {
        "step_s": 10.0,
        "num_input_tokens": 500,
        "tokens_per_s": 50.0,
        "tokens_per_s_per_rank": 25.0,
        "microbatches_min": 1,
        "microbatches_max": 3,
        "slowest_rank": 1,
        "idle_fraction": 0.25,
        "fetch_wait_s": 0.25,
        "accumulate_wait_s": 0.5,
        "boundary_wait_s": 1.0,
    }


class Event:
    """An event at a time in milliseconds, after `waits` waits."""

    def __init__(self, at_ms):
        self.at_ms, self.waits = at_ms, 0

    def synchronize(self):
        self.waits += 1

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


def test_results_of_a_device_are_read_at_the_end_with_the_times_of_its_events(monkeypatch):
    events = [Event(at) for at in (0, 10, 12, 32, 40, 70)]
    remaining, now = iter(events), {"wall": 0.0, "busy": 0.0}
    monkeypatch.setattr(timing, "_record", lambda device: next(remaining))
    monkeypatch.setattr(timing, "perf_counter", lambda: now["wall"])
    timer = DeviceMicrobatchTimer(lambda: now["busy"], torch.device("cpu"))
    for number in range(3):
        timer.begin()
        now["wall"] += 0.005
        now["busy"] += 0.005 - 0.004 * (number == 1)  # it waits for a slower rank
        assert timer.end(f"microbatch {number}", torch.tensor([number + 0.5, 7.0, number])) == []
    assert [event.waits for event in events] == [0, 1, 0, 1, 0, 0], "one microbatch is enqueued while another computes"
    now["wall"] = 1.0
    found = timer.drain()
    assert [(each.microbatch, each.loss, each.statistics) for each in found] == [
        (f"microbatch {number}", number + 0.5, [7.0, number]) for number in range(3)
    ]
    assert [each.busy_s for each in found] == pytest.approx([0.010, 0.016, 0.030])
    assert [each.began for each in found] == pytest.approx([0.93, 0.942, 0.97])
    assert [each.ended for each in found] == pytest.approx([0.94, 0.962, 1.0])
    assert timer.drain() == []


def test_waits_of_islands_are_reported_with_the_next_step_and_all_at_the_end():
    usage = SimpleNamespace(island_wait_s=5.0, bytes_between_islands=100)  # until the first step
    other_waits_s = iter([0.0, 3.0])
    world = SimpleNamespace(gather_objects=lambda value: [value, 4.0])
    metrics, lines = IslandMetrics(world, SimpleNamespace(usage=usage)), []
    for number in (1, 2):
        num_bytes, wait_s = metrics.local_values()
        per_rank = {
            "bytes_between_islands": np.array([num_bytes, 200.0]),
            "island_wait_s": np.array([wait_s, next(other_waits_s)]),
        }
        lines.append(Step(number, None, {}))
        metrics.on_gathered(lines[-1], SimpleNamespace(per_rank=per_rank.get))
        usage.island_wait_s += number
    assert [line.metrics["bytes_between_islands"] for line in lines] == [150.0, 150.0]
    assert [line.metrics["island_wait_s"] for line in lines] == [0.0, (1.0 + 3.0) / 2]
    assert metrics.on_train_end() == {"island_wait_s": (3.0 + 4.0) / 2}

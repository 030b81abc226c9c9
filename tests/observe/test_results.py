"""Sums of a callback, and results of microbatches on a device, whose events have times that the test chooses."""

import math
import random

import pytest
import torch

from odc_mpi.observe import microbatch_results
from odc_mpi.observe.callback import round_for_exact_sum
from odc_mpi.observe.microbatch_results import DeviceResults


@pytest.mark.parametrize("most", [1.0, 256.0, 3e9, 1e-3])
def test_sums_do_not_depend_on_their_order(most: float) -> None:
    draw = random.Random(2)
    numbers = [most * draw.uniform(-1, 1) * 10 ** draw.uniform(-9, 0) for _ in range(1000)]
    rounded = [round_for_exact_sum(number, most) for number in numbers]
    assert max(abs(a - b) for a, b in zip(numbers, rounded, strict=True)) <= most * 2.0**-44
    sums, before = set(), set()
    for _ in range(20):
        draw.shuffle(rounded)
        draw.shuffle(numbers)
        # In parts, as ranks have them.
        position = draw.randrange(1000)
        sums.add(sum(rounded[:position]) + sum(rounded[position:]))
        before.add(sum(numbers[:position]) + sum(numbers[position:]))
    assert sums == {math.fsum(rounded)}
    assert len(before) > 1, "sums of these do not depend on their order anyway"


def test_values_that_are_not_finite_do_not_change() -> None:
    assert round_for_exact_sum(math.inf, 1.0) == math.inf
    assert math.isnan(round_for_exact_sum(math.nan, 1.0))


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
    monkeypatch.setattr(microbatch_results, "_record", lambda device: next(remaining))
    monkeypatch.setattr(microbatch_results, "perf_counter", lambda: now["wall"])
    results = DeviceResults(lambda: now["busy"], torch.device("cpu"))
    for number in range(3):
        results.begin()
        now["wall"] += 0.005
        now["busy"] += 0.005 - 0.004 * (number == 1)  # it waits for a slower rank
        assert results.end(f"microbatch {number}", torch.tensor([number + 0.5, 7.0, number])) == []
    assert [event.waits for event in events] == [0, 1, 0, 1, 0, 0], "one microbatch is enqueued while another computes"
    now["wall"] = 1.0
    found = results.drain()
    assert [(each.microbatch, each.loss, each.statistics) for each in found] == [
        (f"microbatch {number}", number + 0.5, [7.0, number]) for number in range(3)
    ]
    assert [each.busy_s for each in found] == pytest.approx([0.010, 0.016, 0.030])
    assert [each.began for each in found] == pytest.approx([0.93, 0.942, 0.97])
    assert [each.ended for each in found] == pytest.approx([0.94, 0.962, 1.0])
    assert results.drain() == []

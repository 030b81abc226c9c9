"""Metrics of islands, without a run."""

from types import SimpleNamespace

import numpy as np

from odc_mpi.observe.callback import Step
from odc_mpi.observe.timing import IslandMetrics


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

"""Time, epoch, speed per rank, utilization and peak memory of a step, and waits of islands."""

from datetime import datetime, timezone
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from odc_mpi.data.plan.cost import CostModel
from odc_mpi.observe import timing
from odc_mpi.observe.callback import Step
from odc_mpi.observe.timing import IslandMetrics, ThroughputMetrics, peak_flops


def test_peaks():
    peaks = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H200": 989, "NVIDIA A100-SXM4-80GB": 312}
    peaks |= {"NVIDIA A10": 125, "NVIDIA L4": 121, "NVIDIA L40S": 362}
    assert [peak_flops(name) for name in peaks] == [1e12 * tera for tera in peaks.values()]
    assert peak_flops("NVIDIA GeForce GTX 1080") is None


def test_a_step(monkeypatch):
    monkeypatch.setattr(timing.torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(timing.torch.cuda, "max_memory_allocated", lambda device: 7)
    metrics = ThroughputMetrics(
        4, torch.device("cuda"), num_epochs=lambda: 0.75, flops=CostModel(linear=3e12, quadratic=1e12)
    )
    host, device = metrics.local_values()
    assert host > 1e7 and device == 7
    dataset = SimpleNamespace(lengths=np.array([5, 9, 2]))
    minibatch = SimpleNamespace(dataset=dataset, indices=np.array([2, 0]))
    step = Step(6, minibatch, {"step_s": 2.0, "tokens_per_s": 100.0})
    metrics.on_gathered(step, SimpleNamespace(per_rank=lambda name: np.array([1.0, 3.0])))
    metrics.on_step_end(step)
    found = step.metrics
    assert (found["epoch"], found["tokens_per_s_per_rank"], found["peak_device_bytes"]) == (0.75, 25.0, 3)
    # Sequences of 2 and 5 tokens.
    assert found["mfu"] == pytest.approx((3e12 * 7 + 1e12 * 29) / 2.0 / (4 * 312e12))
    age = datetime.now(timezone.utc) - datetime.fromisoformat(found["time"])
    assert 0 <= age.total_seconds() < 60


def test_without_a_gpu_and_before_the_first_step():
    metrics = ThroughputMetrics(1, torch.device("cpu"), num_epochs=lambda: 0.0, flops=CostModel())
    assert metrics._flops is None and metrics.local_values()[1] == 0
    nothing, evaluated = {"step": 0}, {"step": 0, "eval_loss": 1.0}
    metrics.on_train_begin(0, nothing)
    metrics.on_train_begin(0, evaluated)
    assert nothing == {"step": 0} and evaluated["epoch"] == 0.0 and "time" in evaluated


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

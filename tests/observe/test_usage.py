"""Time, epoch, utilization, transferred bytes and memory of a step."""

from datetime import datetime, timezone
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from odc_mpi.data.plan.cost import CostModel
from odc_mpi.observe import usage
from odc_mpi.observe.callback import Step
from odc_mpi.observe.usage import UsageMetrics, peak_flops


def test_peaks():
    peaks = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H200": 989, "NVIDIA A100-SXM4-80GB": 312}
    peaks |= {"NVIDIA A10": 125, "NVIDIA L4": 121, "NVIDIA L40S": 362}
    assert [peak_flops(name) for name in peaks] == [1e12 * tera for tera in peaks.values()]
    assert peak_flops("NVIDIA GeForce GTX 1080") is None


def model_on(device):
    return SimpleNamespace(device=torch.device(device), usage=SimpleNamespace(num_collectives=0))


def test_a_step(monkeypatch):
    monkeypatch.setattr(usage.torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(usage.torch.cuda, "max_memory_allocated", lambda device: 7)
    flops = CostModel(linear=3e12, quadratic=1e12)
    metrics = UsageMetrics(SimpleNamespace(size=4), model_on("cuda"), lambda: 0.75, flops)
    host, device = metrics.local_values()
    assert host > 1e7 and device == 7
    dataset = SimpleNamespace(lengths=np.array([5, 9, 2]))
    minibatch = SimpleNamespace(dataset=dataset, indices=np.array([2, 0]))
    step = Step(6, minibatch, {"step_s": 2.0})
    metrics.on_gathered(step, SimpleNamespace(per_rank=lambda name: np.array([1.0, 3.0])))
    metrics.on_step_end(step)
    found = step.metrics
    assert (found["epoch"], found["bytes_pushed"], found["peak_device_bytes"]) == (0.75, 4.0, 3)
    # Sequences of 2 and 5 tokens.
    assert found["mfu"] == pytest.approx((3e12 * 7 + 1e12 * 29) / 2.0 / (4 * 312e12))
    age = datetime.now(timezone.utc) - datetime.fromisoformat(found["time"])
    assert 0 <= age.total_seconds() < 60


def test_without_a_gpu_and_before_the_first_step():
    metrics = UsageMetrics(SimpleNamespace(size=1), model_on("cpu"), lambda: 0.0, CostModel())
    assert metrics._flops is None and metrics.local_values()[1] == 0
    nothing, evaluated = {"step": 0}, {"step": 0, "eval_loss": 1.0}
    metrics.on_train_begin(0, nothing)
    metrics.on_train_begin(0, evaluated)
    assert nothing == {"step": 0} and evaluated["epoch"] == 0.0 and "time" in evaluated

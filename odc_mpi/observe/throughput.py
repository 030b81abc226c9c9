"""Throughput metrics: time, epoch, tokens per second per rank, model FLOPs utilization (MFU), and peak memory."""

import re
from datetime import datetime, timezone
from typing import Any, ClassVar

import torch
from typing_extensions import override

from odc_mpi.data.plan.cost import CostModel
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.metrics import ProgressColumn
from odc_mpi.runtime.memory import peak_resident_bytes
from odc_mpi.shard import model as sharded

#: Peak bfloat16 FLOP/s of GPUs without sparsity, from NVIDIA's data sheets. Keys are patterns for torch's device names.
_PEAK_FLOPS = {
    r"GB200|B200": 2.25e15,
    r"H200|H100 80GB HBM3|GH200": 989e12,
    r"H100 NVL": 835e12,
    r"H100 PCIe": 756e12,
    r"A100": 312e12,
    r"A40\b": 150e12,
    r"A10\b": 125e12,
    r"L40S": 362e12,
    r"L4\b": 121e12,
}


def peak_flops(device_name: str) -> float | None:
    """Return the peak bfloat16 FLOP/s of a GPU, or None if the GPU is unknown."""
    return next((flops for pattern, flops in _PEAK_FLOPS.items() if re.search(pattern, device_name)), None)


class ThroughputMetrics(Callback):
    """Adds time, epoch, tokens per second per rank, model FLOPs utilization and peak memory to the metrics of a step.

    Must run after the callbacks that report `step_s` and `tokens_per_s`. `flops` models the FLOPs for the forward and
    backward passes of a sequence. Without it, or if the peak FLOP/s of the device is unknown, there is no utilization.
    """

    gathered_names = ("peak_host_bytes", "peak_device_bytes")
    columns: ClassVar = (ProgressColumn("epoch", 5, "{epoch:.2f}"),)

    def __init__(self, num_ranks: int, device: torch.device, steps_per_epoch: int, flops: CostModel | None) -> None:
        self._num_ranks, self._device, self._steps_per_epoch = num_ranks, device, steps_per_epoch
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._flops = (flops, peak * num_ranks) if flops and peak else None

    @override
    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        if len(metrics) > 1:
            metrics |= self._progress(completed_steps)

    def local_values(self) -> tuple[float, float]:
        """Return the peak memory of this process in bytes: resident on the host, and allocated by torch on a GPU."""
        on_gpu = self._device.type == "cuda"
        return float(peak_resident_bytes()), float(torch.cuda.max_memory_allocated(self._device) if on_gpu else 0)

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Add the peak host memory and, on a GPU, the peak device memory, in bytes, as maxima over all ranks."""
        for name in self.gathered_names[: 2 if self._device.type == "cuda" else 1]:
            step.metrics[name] = int(gathered.per_rank(name).max())

    @override
    def on_step_end(self, step: Step) -> None:
        metrics = step.metrics
        metrics |= self._progress(step.number)
        metrics["tokens_per_s_per_rank"] = metrics["tokens_per_s"] / self._num_ranks
        if self._flops:
            flops, peak = self._flops
            lengths = step.minibatch.dataset.lengths[step.minibatch.indices]
            metrics["mfu"] = float(flops.sequence(lengths).sum()) / metrics["step_s"] / peak

    def _progress(self, step: int) -> dict[str, Any]:
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        return {"time": now, "epoch": step / self._steps_per_epoch}

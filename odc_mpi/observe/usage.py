"""Usage of a step: bytes transferred, memory, collectives, and the share of the peak FLOP/s of GPUs."""

import re
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import torch
from typing_extensions import override

from odc_mpi.data.plan.cost import CostModel
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.metrics import DETAILS, MEMORY, SPEED, Metric
from odc_mpi.runtime.memory import peak_resident_bytes
from odc_mpi.runtime.world import World
from odc_mpi.shard.minibatch_stats import TRAFFIC, MinibatchStats
from odc_mpi.shard.model import ShardedModel

#: Peak dense bfloat16 FLOP/s of GPUs, from NVIDIA's data sheets. Keys are patterns for torch's device names.
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


class UsageMetrics(Callback):
    """Adds transferred bytes, memory, model FLOPs utilization, time and epoch to the metrics of a step.

    Bytes fetched and pushed are means over the ranks. Those of an evaluation are counted in the next minibatch. `flops`
    models the FLOPs of the forward and backward passes of a sequence. If it is None or the device's peak FLOP/s is
    unknown, the utilization is omitted.
    """

    gathered_names = ("peak_host_bytes", "peak_device_bytes")
    metrics = (
        Metric("time", "end of the step in UTC (ISO 8601)", SPEED),
        Metric("epoch", "passes over the data so far", SPEED, form="{:.2f}", column=("epoch", 5)),
        Metric("mfu", "model FLOPs per second / peak of all GPUs in bfloat16", SPEED),
        Metric("peak_parameter_bytes", "fetched parameters, peak per rank", MEMORY, "end", row="peak parameter memory"),
        Metric("peak_gradient_bytes", "gradient buffers, peak per rank", MEMORY, "end"),
        Metric("parameter_cache_bytes", "cache of parameters, per rank", MEMORY, "end"),
        Metric("gradient_cache_bytes", "cache of gradients, per rank", MEMORY, "end"),
        Metric(
            "collectives_per_minibatch",
            "collectives per step",
            MEMORY,
            "end",
            "{:.1f}",
            row="collectives per minibatch",
        ),
        Metric("bytes_fetched", "fetched per step and rank", MEMORY, "per_step"),
        Metric("bytes_fetched_same_node", "fetched from the same node, per step and rank", DETAILS, "per_step"),
        Metric("bytes_fetched_other_nodes", "of these from other nodes", MEMORY, "per_step"),
        Metric("bytes_pushed", "pushed per step and rank", MEMORY, "per_step"),
        Metric("bytes_pushed_same_node", "pushed to the same node, per step and rank", DETAILS, "per_step"),
        Metric("bytes_pushed_other_nodes", "of these to other nodes", MEMORY, "per_step"),
        Metric("peak_host_bytes", "resident memory with shared windows, largest of all ranks", MEMORY),
        Metric("peak_device_bytes", "GPU memory of torch, largest of all ranks", MEMORY),
    )

    def __init__(
        self, world: World, model: ShardedModel, num_epochs: Callable[[], float], flops: CostModel | None
    ) -> None:
        self._world, self._model, self._device, self._num_epochs = world, model, model.device, num_epochs
        self._num_steps, self._num_collectives = 0, model.usage.num_collectives
        self._on_gpu = self._device.type == "cuda"
        peak = peak_flops(torch.cuda.get_device_name(self._device)) if self._on_gpu else None
        self._flops = (flops, peak * world.size) if flops and peak else None

    @override
    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        if len(metrics) > 1:
            metrics |= self._progress()

    def local_values(self) -> tuple[float, float]:
        """Return the peak memory of this process in bytes: resident on the host, and allocated by torch on a GPU."""
        return float(peak_resident_bytes()), float(torch.cuda.max_memory_allocated(self._device) if self._on_gpu else 0)

    @override
    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        means = {name: float(gathered.per_rank(name).mean()) for name in TRAFFIC}
        for key in ("bytes_fetched", "bytes_pushed"):
            step.metrics[key] = means[f"{key}_same_node"] + means[f"{key}_other_nodes"]
        step.metrics |= means
        for name in self.gathered_names[: 2 if self._on_gpu else 1]:
            step.metrics[name] = int(gathered.per_rank(name).max())

    @override
    def on_step_end(self, step: Step) -> None:
        self._num_steps += 1
        step.metrics |= self._progress()
        if self._flops:
            flops, peak = self._flops
            lengths = step.minibatch.dataset.lengths[step.minibatch.indices]
            step.metrics["mfu"] = float(flops.sequence(lengths).sum()) / step.metrics["step_s"] / peak

    def on_train_end(self) -> dict[str, Any]:
        """Return the peak memory and the sizes of caches in bytes, and the collectives per minibatch. Collective.

        Peaks are maxima over the ranks, and sizes of caches are minima.
        """
        usage, caches = self._model.usage, self._model.cache_bytes
        num_collectives = usage.num_collectives - self._num_collectives
        peaks = {name: getattr(usage, name) for name in ("peak_parameter_bytes", "peak_gradient_bytes")}
        sizes = {"parameter_cache_bytes": caches.parameters, "gradient_cache_bytes": caches.gradients}
        gathered = self._world.gather_objects(peaks | sizes)
        return {
            **{name: max(of_rank[name] for of_rank in gathered) for name in peaks},
            **{name: min(of_rank[name] for of_rank in gathered) for name in sizes},
            "collectives_per_minibatch": num_collectives / max(1, self._num_steps),
        }

    def _progress(self) -> dict[str, Any]:
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        return {"time": now, "epoch": self._num_epochs()}


def peak_flops(device_name: str) -> float | None:
    """Return the peak bfloat16 FLOP/s of a GPU, or None if the GPU is unknown."""
    return next((flops for pattern, flops in _PEAK_FLOPS.items() if re.search(pattern, device_name)), None)

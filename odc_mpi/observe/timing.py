"""Time, throughput and traffic metrics: busy and wait times, tokens per second, peak memory, and transferred bytes."""

import re
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import torch
from typing_extensions import override

from odc_mpi.data.plan.cost import CostModel
from odc_mpi.observe.callback import Callback, MicrobatchResult, Step
from odc_mpi.observe.metrics import DETAILS, MEMORY, SPEED, Metric
from odc_mpi.runtime.memory import peak_resident_bytes
from odc_mpi.runtime.start.start_times import StartTimes
from odc_mpi.runtime.world import World
from odc_mpi.shard.minibatch_stats import TRAFFIC, MinibatchStats
from odc_mpi.shard.model import ShardedModel
from odc_mpi.shard.spans import SHARDING, SpanRecorder

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


class StartReport(Callback):
    """Adds the duration of each startup phase to the summary, in seconds, as the maximum over all ranks.

    Must be the first callback, because the `on_train_begin` hooks of later callbacks are part of the next phase.
    """

    metrics = (Metric("start_s", "start, by phase", SPEED, "end"),)

    def __init__(self, world: World, start_times: StartTimes, spans: SpanRecorder) -> None:
        self._world, self._start_times, self._spans = world, start_times, spans

    @override
    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        self._start_times.end("other", **{kind: self._spans.seconds[kind] for kind in SHARDING})

    @override
    def on_step_begin(self, step: Step) -> None:
        if not self._start_times.seconds["first_step"]:
            self._start_times.end("evaluation")

    @override
    def on_step_end(self, step: Step) -> None:
        if not self._start_times.seconds["first_step"]:
            self._start_times.end("first_step")

    @override
    def on_train_end(self) -> dict[str, Any]:
        """Return `start_s`: seconds per phase, and their sum as `total`, each as the maximum over ranks. Collective."""
        times_of_ranks = self._world.gather_objects(self._start_times.seconds)
        phases = {phase: max(times[phase] for times in times_of_ranks) for phase in self._start_times.seconds}
        return {"start_s": phases | {"total": max(sum(times.values()) for times in times_of_ranks)}}


class StepTimeMetrics(Callback):
    """Adds idle and wait times, numbers of microbatches and the slowest rank to the metrics, and times to the summary.

    `clock` returns the time in seconds on a clock that stops while this rank waits for slower ranks.
    """

    gathered_names = ("busy_s", "fetch_s", "accumulate_s", "microbatches")
    metrics = (
        Metric(
            "idle_fraction",
            "idle, waiting at step ends",
            SPEED,
            "mean",
            "{:.1%}",
            ("idle", 6),
            row="idle (waiting at step ends)",
            views="watch",
        ),
        Metric("microbatches_min", "fewest microbatches of a rank", SPEED, "", "{}-{microbatches_max}", ("micro", 5)),
        Metric("microbatches_max", "most microbatches of a rank", SPEED),
        Metric("slowest_rank", "rank with the longest busy time", SPEED, form="rank {}", column=("slowest", 7)),
        Metric("fetch_wait_s", "waiting for parameters, per rank", SPEED, "sum", "{:.2f} s", row="wait: fetch"),
        Metric("accumulate_wait_s", "waiting for pushes, per rank", SPEED, "sum", "{:.2f} s", row="wait: push"),
        Metric("boundary_wait_s", "waiting at step ends, per rank", SPEED, "sum", "{:.2f} s", row="wait: step end"),
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
    )

    def __init__(self, world: World, model: ShardedModel, clock: Callable[[], float]) -> None:
        self._world, self._model, self._clock = world, model, clock
        self._seconds, self._num_collectives = model.spans.seconds, model.usage.num_collectives
        self._num_steps = self._num_microbatches = 0
        self._began = self._fetch_s = self._accumulate_s = 0.0

    @override
    def on_step_begin(self, step: Step) -> None:
        self._num_microbatches = 0
        self._fetch_s, self._accumulate_s = self._seconds["fetch"], self._seconds["accumulate"]
        self._began = self._clock()

    @override
    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        self._num_microbatches += 1

    @override
    def local_values(self) -> tuple[float, ...]:
        fetch_s = self._seconds["fetch"] - self._fetch_s
        accumulate_s = self._seconds["accumulate"] - self._accumulate_s
        return self._clock() - self._began, fetch_s, accumulate_s, float(self._num_microbatches)

    @override
    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        busy_s, microbatches = gathered.per_rank("busy_s"), gathered.per_rank("microbatches")
        mean_s, slowest_s = float(busy_s.mean()), float(busy_s.max())
        step.metrics |= {
            "idle_fraction": 1.0 - mean_s / slowest_s if slowest_s > 0 else 0.0,  # waiting at the end of the step
            "microbatches_min": int(microbatches.min()),
            "microbatches_max": int(microbatches.max()),
            "slowest_rank": int(busy_s.argmax()),
            # Means over the ranks: waits for parameters, for pushes, and for other ranks at the end of the step.
            "fetch_wait_s": float(gathered.per_rank("fetch_s").mean()),
            "accumulate_wait_s": float(gathered.per_rank("accumulate_s").mean()),
            "boundary_wait_s": slowest_s - mean_s,
        }

    @override
    def on_step_end(self, step: Step) -> None:
        self._num_steps += 1

    def on_train_end(self) -> dict[str, Any]:
        """Return wait times since the last start, peak memory, cache sizes, and collectives per minibatch. Collective.

        Wait times are means over the ranks, in seconds, and include waits for the gradient norm and for the publication
        of parameters. Peak memory is the maximum over the ranks, and cache sizes are minima, all in bytes.
        """
        usage, caches = self._model.usage, self._model.cache_bytes
        num_collectives = usage.num_collectives - self._num_collectives
        peaks = {name: getattr(usage, name) for name in ("peak_parameter_bytes", "peak_gradient_bytes")}
        sizes = {"parameter_cache_bytes": caches.parameters, "gradient_cache_bytes": caches.gradients}
        waits = {f"{kind}_wait_s": self._seconds[kind] for kind in ("fetch", "accumulate")}
        waits["boundary_wait_s"] = usage.boundary_wait_s
        gathered = self._world.gather_objects(peaks | sizes | waits)
        values = {name: [of_rank[name] for of_rank in gathered] for name in gathered[0]}
        return {
            **{name: max(values[name]) for name in peaks},
            **{name: min(values[name]) for name in sizes},
            "collectives_per_minibatch": num_collectives / max(1, self._num_steps),
            **{name: sum(values[name]) / len(values[name]) for name in waits},
        }


class TrafficReport(Callback):
    """Adds bytes fetched and pushed per minibatch to the metrics, as means over the ranks.

    Bytes fetched during an evaluation are counted in the next minibatch.
    """

    metrics = (
        Metric("bytes_fetched", "fetched per step and rank", MEMORY, "per_step"),
        Metric("bytes_fetched_same_node", "fetched from the same node, per step and rank", DETAILS, "per_step"),
        Metric("bytes_fetched_other_nodes", "of these from other nodes", MEMORY, "per_step"),
        Metric("bytes_pushed", "pushed per step and rank", MEMORY, "per_step"),
        Metric("bytes_pushed_same_node", "pushed to the same node, per step and rank", DETAILS, "per_step"),
        Metric("bytes_pushed_other_nodes", "of these to other nodes", MEMORY, "per_step"),
    )

    @override
    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        means = {name: float(gathered.per_rank(name).mean()) for name in TRAFFIC}
        for key in ("bytes_fetched", "bytes_pushed"):
            step.metrics[key] = means[f"{key}_same_node"] + means[f"{key}_other_nodes"]
        step.metrics |= means


class IslandMetrics(Callback):
    """Adds bytes exchanged with other islands per minibatch, and wait times, to the metrics, as means over the ranks.

    A rank waits for other ranks of its island and for exchanges with other islands. The waits are those at the end of
    the previous minibatch, because `local_values` are computed before the waits of the current minibatch.
    """

    gathered_names = ("bytes_between_islands", "island_wait_s")
    metrics = (
        Metric("bytes_between_islands", "exchanged with other islands per step and rank", MEMORY, "per_step"),
        Metric("island_wait_s", "waiting for islands, per rank", SPEED, "sum"),
    )

    def __init__(self, world: World, model: ShardedModel) -> None:
        self._world, self._usage = world, model.usage
        self._start_s = self._reported_s = model.usage.island_wait_s

    @override
    def local_values(self) -> tuple[float, ...]:
        before, self._reported_s = self._reported_s, self._usage.island_wait_s
        return float(self._usage.bytes_between_islands), self._reported_s - before

    @override
    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        step.metrics |= {name: float(gathered.per_rank(name).mean()) for name in self.gathered_names}

    def on_train_end(self) -> dict[str, Any]:
        """Return the wait times since the last start, including those of the last minibatch. Collective."""
        waits_s = self._world.gather_objects(self._usage.island_wait_s - self._start_s)
        return {"island_wait_s": sum(waits_s) / len(waits_s)}


def peak_flops(device_name: str) -> float | None:
    """Return the peak bfloat16 FLOP/s of a GPU, or None if the GPU is unknown."""
    return next((flops for pattern, flops in _PEAK_FLOPS.items() if re.search(pattern, device_name)), None)


class ThroughputMetrics(Callback):
    """Adds time, epoch, tokens per second per rank, model FLOPs utilization and peak memory to the metrics of a step.

    Must run after the callbacks that report `step_s` and `tokens_per_s`. `flops` models the FLOPs of the forward and
    backward passes of a sequence. If it is None or the device's peak FLOP/s is unknown, the utilization is omitted.
    """

    gathered_names = ("peak_host_bytes", "peak_device_bytes")
    metrics = (
        Metric("time", "end of the step in UTC (ISO 8601)", SPEED),
        Metric("epoch", "passes over the data so far", SPEED, form="{:.2f}", column=("epoch", 5)),
        Metric("tokens_per_s_per_rank", "tokens per second of a rank", SPEED),
        Metric("mfu", "model FLOPs per second / peak of all GPUs in bfloat16", SPEED),
        Metric("peak_host_bytes", "resident memory with shared windows, largest of all ranks", MEMORY),
        Metric("peak_device_bytes", "GPU memory of torch, largest of all ranks", MEMORY),
    )

    def __init__(
        self, num_ranks: int, device: torch.device, num_epochs: Callable[[], float], flops: CostModel | None
    ) -> None:
        self._num_ranks, self._device, self._num_epochs = num_ranks, device, num_epochs
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._flops = (flops, peak * num_ranks) if flops and peak else None

    @override
    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        if len(metrics) > 1:
            metrics |= self._progress()

    def local_values(self) -> tuple[float, float]:
        """Return the peak memory of this process in bytes: resident on the host, and allocated by torch on a GPU."""
        on_gpu = self._device.type == "cuda"
        return float(peak_resident_bytes()), float(torch.cuda.max_memory_allocated(self._device) if on_gpu else 0)

    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        """Add the peak host memory and, on a GPU, the peak device memory, in bytes, as maxima over all ranks."""
        for name in self.gathered_names[: 2 if self._device.type == "cuda" else 1]:
            step.metrics[name] = int(gathered.per_rank(name).max())

    @override
    def on_step_end(self, step: Step) -> None:
        metrics = step.metrics
        metrics |= self._progress()
        metrics["tokens_per_s_per_rank"] = metrics["tokens_per_s"] / self._num_ranks
        if self._flops:
            flops, peak = self._flops
            lengths = step.minibatch.dataset.lengths[step.minibatch.indices]
            metrics["mfu"] = float(flops.sequence(lengths).sum()) / metrics["step_s"] / peak

    def _progress(self) -> dict[str, Any]:
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        return {"time": now, "epoch": self._num_epochs()}

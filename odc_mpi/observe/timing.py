"""Times of a run: of its start, its steps and its microbatches. No other module computes these.

    step_s    of a step: from the request for the minibatch to the publication of the parameters
    busy_s    of a rank: from the beginning of the minibatch to the end of its last microbatch; also of a microbatch

Busy times stop in waits for slower ranks. A rank is idle for the longest busy time of all ranks minus its own. The time
in which a rank fetches, pushes or waits is added up by kind where it is spent (`shard.spans`).
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from odc_mpi.data.microbatch import Microbatch
from odc_mpi.observe.callback import Callback, MicrobatchResult, Step
from odc_mpi.observe.metrics import MEMORY, SPEED, Metric
from odc_mpi.runtime.start.start_times import StartTimes
from odc_mpi.runtime.world import World
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.shard.model import ShardedModel
from odc_mpi.shard.spans import SHARDING, SpanRecorder


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


class StepTimes(Callback):
    """Measures steps and their microbatches on this rank, and adds times, speed and the slowest rank to the metrics.

    `waited_s` returns the time for which this rank has waited for slower ranks inside of microbatches, in seconds. The
    training loop starts and stops the timer `microbatches`.
    """

    gathered_names = ("busy_s", "fetch_s", "accumulate_s", "microbatches")
    metrics = (
        Metric("step_s", "duration of the step", SPEED),
        Metric("tokens_per_s", "tokens per second", SPEED, "mean", "{:,.0f}", ("tokens/s", 9), views="watch"),
        Metric("tokens_per_s_per_rank", "tokens per second of a rank", SPEED),
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
    )

    def __init__(self, world: World, model: ShardedModel, waited_s: Callable[[], float]) -> None:
        self._world, self._model, self._seconds = world, model, model.spans.seconds

        def clock() -> float:
            return perf_counter() - waited_s()

        self._clock = clock
        on_gpu = model.device.type == "cuda"
        self.microbatches = DeviceMicrobatchTimer(clock, model.device) if on_gpu else MicrobatchTimer(clock)
        self._num_microbatches = 0
        self._began = self._fetch_s = self._accumulate_s = 0.0

    @contextmanager
    def measure(self, metrics: dict[str, Any]) -> Iterator[None]:
        """Context manager for a step up to the publication of the parameters, which adds `step_s` to `metrics`."""
        began = perf_counter()
        yield
        metrics["step_s"] = perf_counter() - began

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
        step.metrics["tokens_per_s"] = step.metrics["num_input_tokens"] / step.metrics["step_s"]
        step.metrics["tokens_per_s_per_rank"] = step.metrics["tokens_per_s"] / self._world.size

    def on_train_end(self) -> dict[str, Any]:
        """Return wait times since the last start, in seconds, as means over the ranks. Collective.

        They include waits for the gradient norm and for the publication of parameters.
        """
        waits = {f"{kind}_wait_s": self._seconds[kind] for kind in ("fetch", "accumulate")}
        waits["boundary_wait_s"] = self._model.usage.boundary_wait_s
        gathered = self._world.gather_objects(waits)
        return {name: sum(of_rank[name] for of_rank in gathered) / len(gathered) for name in waits}


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


class MicrobatchTimer:
    """Times and losses of microbatches computed on the host. Each is complete when the backward pass returns.

    `clock` returns a time in seconds and must not advance while this rank waits for slower ranks.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = self._busy_s = 0.0

    def begin(self) -> None:
        """Begin a microbatch."""
        self._began, self._busy_s = perf_counter(), self._clock()

    def end(self, microbatch: Microbatch, values: torch.Tensor) -> list[MicrobatchResult]:
        """End a microbatch, and return the results that are complete, in order.

        `values`, float64 `[1 + k]`, contains the microbatch's loss, followed by the objective's `k` statistics.
        """
        loss, *statistics = values.tolist()
        busy_s = self._clock() - self._busy_s
        return [MicrobatchResult(microbatch, loss, statistics, self._began, perf_counter(), busy_s)]

    def drain(self) -> list[MicrobatchResult]:
        """Return all results that `end` has not returned, in order. Waits for the device."""
        return []


class _Pending(NamedTuple):
    """Microbatch that a GPU may still be computing. `waited_s` is the time of waits for slower ranks, in seconds."""

    microbatch: Microbatch
    values: torch.Tensor
    began: torch.cuda.Event
    ended: torch.cuda.Event
    waited_s: float


class DeviceMicrobatchTimer(MicrobatchTimer):
    """Times and losses of microbatches on a GPU, measured with events and read at the end of the minibatch.

    A backward pass returns before the GPU has finished it. If the host read each loss immediately, the GPU would idle
    until it got new kernels.

    The host runs at most one microbatch ahead of the GPU. Otherwise, it could claim microbatches that other ranks could
    compute sooner.
    """

    def __init__(self, clock: Callable[[], float], device: torch.device) -> None:
        super().__init__(clock)
        self._device = device
        self._pending: deque[_Pending] = deque()

    @override
    def begin(self) -> None:
        super().begin()
        self._event = _record(self._device)

    @override
    def end(self, microbatch: Microbatch, values: torch.Tensor) -> list[MicrobatchResult]:
        waited_s = perf_counter() - self._began - (self._clock() - self._busy_s)
        self._pending.append(_Pending(microbatch, values, self._event, _record(self._device), waited_s))
        if len(self._pending) > 1:
            self._pending[-2].ended.synchronize()
        return []

    @override
    def drain(self) -> list[MicrobatchResult]:
        pending, self._pending = list(self._pending), deque()
        if not pending:
            return []
        rows = torch.stack([each.values for each in pending]).tolist()
        last = pending[-1].ended
        last.synchronize()
        now = perf_counter()
        results = []
        for each, (loss, *statistics) in zip(pending, rows, strict=True):
            ended, took_s = now - _seconds(each.ended, last), _seconds(each.began, each.ended)
            busy_s = max(0.0, took_s - each.waited_s)
            results.append(MicrobatchResult(each.microbatch, loss, statistics, ended - took_s, ended, busy_s))
        return results


def _record(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    return began.elapsed_time(ended) / 1000

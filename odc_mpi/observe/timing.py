"""Where the time of a step goes, over all ranks, who waits for whom, and how many bytes travel."""

from collections.abc import Callable
from typing import Any, ClassVar

from odc_mpi.observe.callback import Callback, MicrobatchResult, Step
from odc_mpi.observe.metrics import ProgressColumn, SummaryField
from odc_mpi.runtime.world import World
from odc_mpi.shard import model as sharded
from odc_mpi.shard.minibatch_stats import TRAFFIC


class StepTimeMetrics(Callback):
    """Reports what ranks worked and waited.

    Args:
        world: The ranks.
        model: Counts the seconds of fetches and pushes, and collectives from now on.
        clock: Returns seconds of this rank's own work, as of `train.loop.Trainer`.
    """

    gathered_names = ("busy_s", "fetch_s", "accumulate_s", "microbatches")
    columns: ClassVar = (
        ProgressColumn("idle", 6, lambda line: f"{line['idle_fraction']:.1%}"),
        ProgressColumn("micro/rk", 8, lambda line: f"{line['microbatches_min']}-{line['microbatches_max']}"),
        ProgressColumn("slowest", 7, lambda line: f"rank {line['slowest_rank']}"),
    )
    summary: ClassVar = {
        "idle_fraction": SummaryField("idle_fraction", "mean"),
        "fetch_wait_s": SummaryField("fetch_wait_s", "sum"),
        "accumulate_wait_s": SummaryField("accumulate_wait_s", "sum"),
        "boundary_wait_s": SummaryField("boundary_wait_s", "sum"),
    }

    def __init__(self, world: World, model: sharded.ShardedModel, clock: Callable[[], float]) -> None:
        self._world, self._model, self._clock = world, model, clock
        self._num_collectives = model.num_collectives
        self._num_steps = self._num_microbatches = 0
        self._began = self._fetch_s = self._accumulate_s = 0.0

    def on_step_begin(self, step: Step) -> None:
        """Start to count."""
        self._num_microbatches = 0
        self._fetch_s, self._accumulate_s = self._model.fetch_wait_s, self._model.accumulate_wait_s
        self._began = self._clock()

    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        """Count a microbatch."""
        self._num_microbatches += 1

    def local_values(self) -> tuple[float, ...]:
        """Return this rank's seconds since `begin`, and its microbatches."""
        fetch_s = self._model.fetch_wait_s - self._fetch_s
        accumulate_s = self._model.accumulate_wait_s - self._accumulate_s
        return self._clock() - self._began, fetch_s, accumulate_s, float(self._num_microbatches)

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Compare the ranks."""
        busy_s, microbatches = gathered.per_rank("busy_s"), gathered.per_rank("microbatches")
        mean_s, slowest_s = float(busy_s.mean()), float(busy_s.max())
        step.metrics |= {
            # That ranks stood at the boundary.
            "idle_fraction": 1.0 - mean_s / slowest_s if slowest_s > 0 else 0.0,
            "microbatches_min": int(microbatches.min()),
            "microbatches_max": int(microbatches.max()),
            "slowest_rank": int(busy_s.argmax()),
            # Means over the ranks: for parameters, for gradients to leave, for other ranks between minibatches.
            "fetch_wait_s": float(gathered.per_rank("fetch_s").mean()),
            "accumulate_wait_s": float(gathered.per_rank("accumulate_s").mean()),
            "boundary_wait_s": slowest_s - mean_s,
        }

    def on_step_end(self, step: Step) -> None:
        """Count the step."""
        self._num_steps += 1

    def on_train_end(self) -> dict[str, Any]:
        """Return waits as measured in whole, at the boundary also those of N and B, and the memory. Collective."""
        model = self._model
        caches = model.cache_bytes
        memory = (model.peak_parameter_bytes, model.peak_gradient_bytes, caches.parameters, caches.gradients)
        local = (memory, model.fetch_wait_s, model.accumulate_wait_s, model.boundary_wait_s)
        bytes_held, *waits = zip(*self._world.gather_objects(local), strict=True)
        parameters, gradients, parameter_caches, gradient_caches = zip(*bytes_held, strict=True)
        fetch_s, accumulate_s, boundary_s = (sum(seconds) / len(seconds) for seconds in waits)
        return {
            "peak_parameter_bytes": max(parameters),
            "peak_gradient_bytes": max(gradients),
            # What every rank has at least.
            "parameter_cache_bytes": min(parameter_caches),
            "gradient_cache_bytes": min(gradient_caches),
            "collectives_per_minibatch": (model.num_collectives - self._num_collectives) / max(1, self._num_steps),
            "fetch_wait_s": fetch_s,
            "accumulate_wait_s": accumulate_s,
            "boundary_wait_s": boundary_s,
        }


class TrafficReport(Callback):
    """Reports bytes that a rank fetches and pushes in a minibatch, from and to its node and others, in the mean.

    What an evaluation fetches counts to the minibatch after it.
    """

    summary: ClassVar = {key: SummaryField(key, "per_step") for key in ("bytes_fetched", "bytes_pushed", *TRAFFIC)}

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Report."""
        means = {name: float(gathered.per_rank(name).mean()) for name in TRAFFIC}
        for key in ("bytes_fetched", "bytes_pushed"):
            step.metrics[key] = means[f"{key}_same_node"] + means[f"{key}_other_nodes"]
        step.metrics |= means

"""Islands of a training run: their construction, and the callback that runs the outer loop of separate islands."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from typing_extensions import override

from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.comm.islands.islands import Islands
from odc_mpi.islands.norms import ChangeRule
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.metrics import Metric
from odc_mpi.observe.timing import IslandMetrics
from odc_mpi.runtime.world import World
from odc_mpi.shard.local_shards import WeightSource
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.evaluation import PeriodicEvaluator
from odc_mpi.training.islands.outer_loop import OuterLoop, merge_results
from odc_mpi.training.islands.state import own_prefix
from odc_mpi.training.rundir.resume import DeferredErrorWeights
from odc_mpi.training.settings import Config

#: Settings that are not arguments of `OuterLoop`. The others have the same names, except for a prefix `outer_`.
_NO_OPTIONS = {"by", "mode", "sync_when", "change"}


class OuterLoopCallback(Callback):
    """Synchronizes islands after the steps that the settings select, and averages their parameters after the last step.

    Args:
        num_steps: Number of steps in the run.
        rule: Rule that uses gradient norms to synchronize before `islands.sync_every` steps have passed, or None.
    """

    metrics = (
        Metric("outer_norm", "norm of the mean difference, in steps in which separate islands were synchronized"),
        Metric("outer_cosine", "likewise the mean cosine between the differences of two islands"),
        Metric("contributions_left_out", "differences of islands that were left out", summary="sum"),
        *IslandMetrics.metrics,
    )

    def __init__(self, loop: OuterLoop, model: ShardedModel, num_steps: int, rule: ChangeRule | None) -> None:
        self.loop, self._model, self._num_steps, self._rule = loop, model, num_steps, rule

    @override
    def on_optimizer_step(self, step: Step) -> None:
        amounts = step.minibatch.island_amounts
        weights = [0] * len(amounts) if step.metrics["skipped"] else amounts
        result = self.loop.step(weights, sync_all=self._has_changed(amounts))
        if step.number == self._num_steps:
            result = merge_results([result, self.loop.average()])
        step.metrics |= result._asdict() if result else {"bytes_between_islands": 0.0, "island_wait_s": 0.0}

    def _has_changed(self, amounts: Sequence[int]) -> bool:
        if self._rule is None:
            return False
        # Each island has only its share of the gradient of the minibatch.
        shares = [amount / sum(amounts) for amount in amounts]
        norms = zip(self._model.replica_norms, shares, strict=True)
        return self._rule.update([norm / share if share else math.nan for norm, share in norms])

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"outer": {**self.loop.state_dict(), "change_rule": self._rule and self._rule.state_dict()}}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of the outer loop if the checkpoint contains one."""
        if state := state_dict.get("outer"):
            self.loop.load_state_dict(state)
            if self._rule and state["change_rule"]:
                self._rule.load_state_dict(state["change_rule"])


def make_islands(config: Config, world: World) -> Islands | None:
    """Divide the ranks into islands. Return None if the settings turn islands off or there is only one. Collective."""
    if config.islands.by == "off":
        return None
    islands = Islands(world, config.islands.by, config.islands.mode)
    if islands.size == 1:
        islands.close()
        return None
    return islands


def resume_weights(checkpoint: Checkpoint, base: WeightSource, islands: Islands | None) -> DeferredErrorWeights:
    """Return a reader for a checkpoint's weights, which reads weights that the checkpoint lacks from `base`.

    An island that trains separately reads its own parameters if the checkpoint has them.
    """
    trains_separately = islands is not None and islands.mode == "outer"
    prefix = own_prefix(checkpoint.manifest, islands.index, islands.size) if islands and trains_separately else ""
    return DeferredErrorWeights(checkpoint, base, prefix)


def build_outer_loop(config: Config, world: World, model: ShardedModel, islands: Islands) -> OuterLoopCallback:
    """Build the outer loop that the settings describe, and its callback. Collective."""
    settings = config.islands
    options = {key.removeprefix("outer_"): value for key, value in asdict(settings).items() if key not in _NO_OPTIONS}
    loop = OuterLoop(world, model, islands, **options)
    rule = ChangeRule(islands.size, settings.change) if settings.sync_when == "change" else None
    return OuterLoopCallback(loop, model, config.run.steps, rule)


def find_outer_loop(callbacks: Iterable[Callback]) -> OuterLoop | None:
    """Return the outer loop of a run, or None if the run does not have one."""
    return next((callback.loop for callback in callbacks if isinstance(callback, OuterLoopCallback)), None)


def use_outer_parameters(callbacks: Iterable[Callback]) -> OuterLoop | None:
    """Make all evaluators evaluate the outer parameters if there is an outer loop. Return the loop, or None."""
    callbacks = list(callbacks)
    outer_loop = find_outer_loop(callbacks)
    for callback in callbacks:
        if outer_loop and isinstance(callback, PeriodicEvaluator):
            callback.evaluated_parameters = outer_loop.outer_parameters
    return outer_loop

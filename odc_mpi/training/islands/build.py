"""Functions that build the islands of a run and their outer loop, and connect them with evaluation and checkpoints."""

from collections.abc import Iterable

from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.comm.islands.islands import Islands
from odc_mpi.islands.change_rule import ChangeRule
from odc_mpi.observe.callback import Callback
from odc_mpi.runtime.world import World
from odc_mpi.shard.local_shards import WeightSource
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.evaluation import PeriodicEvaluator
from odc_mpi.training.islands.callback import OuterLoopCallback
from odc_mpi.training.islands.outer_loop import OuterLoop
from odc_mpi.training.islands.state import own_prefix
from odc_mpi.training.rundir.resume import DeferredErrorWeights
from odc_mpi.training.settings import Config


def make_islands(config: Config, world: World) -> Islands | None:
    """Divide the ranks into islands as the settings say. Return None if there is only one. Collective."""
    if config.islands.by == "off":
        return None
    islands = Islands(world, config.islands.by, config.islands.mode)
    if islands.size == 1:
        islands.close()
        return None
    return islands


def resume_weights(checkpoint: Checkpoint, base: WeightSource, islands: Islands | None) -> DeferredErrorWeights:
    """Return the weights of a checkpoint: those of this rank's island if it trains separately and was saved."""
    trains_apart = islands is not None and islands.mode == "outer"
    prefix = own_prefix(checkpoint.manifest, islands.index, islands.size) if islands and trains_apart else ""
    return DeferredErrorWeights(checkpoint, base, prefix)


def build_outer_loop(config: Config, world: World, model: ShardedModel, islands: Islands) -> OuterLoopCallback:
    """Build the outer loop that the settings describe, and its callback. Collective."""
    settings = config.islands
    loop = OuterLoop(
        world,
        model,
        islands,
        sync_every=settings.sync_every,
        fragments=settings.fragments,
        delay=settings.delay,
        local_share=settings.local_share,
        learning_rate=settings.outer_learning_rate,
        momentum=settings.outer_momentum,
        wire=settings.wire,
        error_feedback=settings.error_feedback,
        norm_limit=settings.norm_limit,
    )
    rule = ChangeRule(islands.size, settings.change) if settings.sync_when == "change" else None
    return OuterLoopCallback(loop, model, config.run.steps, rule)


def find_outer_loop(callbacks: Iterable[Callback]) -> OuterLoop | None:
    """Return the outer loop of a run, or None if it has none."""
    return next((callback.loop for callback in callbacks if isinstance(callback, OuterLoopCallback)), None)


def use_outer_parameters(callbacks: Iterable[Callback]) -> OuterLoop | None:
    """Let all evaluators evaluate the outer parameters, if there is an outer loop. Return the loop or None."""
    callbacks = list(callbacks)
    outer_loop = find_outer_loop(callbacks)
    for callback in callbacks:
        if outer_loop and isinstance(callback, PeriodicEvaluator):
            callback.evaluated_parameters = outer_loop.outer_parameters
    return outer_loop

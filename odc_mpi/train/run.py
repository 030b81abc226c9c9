"""A training run: the parts put together as the configuration says, and seen through to the end.

set up    collective: all ranks agree on configuration, data, model and checkpoint, and allocate windows
steps     `train.loop`
finish    collective: the last checkpoint is waited for, every rank's totals are gathered

Participants of a run come to each stage of a step in this order:

Objective, Update, Source           the loop's own
Timing, TrafficReport               report what ranks worked, waited and sent
LearnedCost, or those of rewards    learn from the step, or evaluate and show completions
Exponents                           of gradients in fixed point
Evaluation                          adds to the metrics of the step
Trace, Log, Tracking                take the metrics, now complete
SkipLimit                           may end the run for a step, whose line is then written and which is not saved
StopWish, Saving                    save, also when the run is to stop
"""

import math
import os
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from odc_mpi.api import decide_for, shard_model
from odc_mpi.checkpoint.state import TrainingState
from odc_mpi.comm.context.piece_windows import PieceWindows
from odc_mpi.comm.tickets import Tickets
from odc_mpi.data.dataset import Dataset
from odc_mpi.data.loader import Loader
from odc_mpi.errors import StoppedError, TrainingError
from odc_mpi.models.configuration import leaves
from odc_mpi.observe.log import Log
from odc_mpi.observe.participant import Participant
from odc_mpi.observe.timing import Timing, TrafficReport
from odc_mpi.observe.trace import Trace
from odc_mpi.observe.trackers import require
from odc_mpi.observe.tracking import FINISH_S, Tracking
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.stack.decision import Decision
from odc_mpi.train.context import Pieces
from odc_mpi.train.evaluation import Evaluation
from odc_mpi.train.exact.conditions import deterministic, reduce_dtype, settled
from odc_mpi.train.exact.exponents import Exponents
from odc_mpi.train.facts import drawn_per_step, facts_of, opening_lines
from odc_mpi.train.inputs import Data, Inputs, first_cost, open_inputs, remove_staged
from odc_mpi.train.loop import Objective, Source, Trainer
from odc_mpi.train.objectives.sft import SupervisedFineTuning
from odc_mpi.train.rl.assemble import learn_from_rewards
from odc_mpi.train.rundir.owner import Owner
from odc_mpi.train.rundir.resume import Origin, PatientWeights, find_origin, open_run, say_complete
from odc_mpi.train.rundir.saving import Saving, about_run
from odc_mpi.train.settings import Config, dump
from odc_mpi.train.source import DatasetSource, LearnedCost
from odc_mpi.train.stop import StopWish
from odc_mpi.train.update import SkipLimit, Update, make_optimizer


def train(config: Config, world: World, stop: StopWish | None = None) -> dict[str, Any]:
    """Run a configuration from the first step to the last. Collective.

    Args:
        config: As `config.load` returns it.
        world: The ranks.
        stop: Whether this rank was asked to stop, heard from the start of the program on; None: from here on.

    Returns:
        The summary, the same on every rank but for times.

    Raises:
        AgreedError: Settings, data and model do not fit together, or not all ranks see the same; raised on every rank
            before anything is written.
        TrainingError: Too many steps in a row had gradients that are not finite, or the last checkpoint could not be
            written; raised on every rank.
        StoppedError: The run was asked to stop, and has saved what it did; raised on every rank.
    """
    with ExitStack() as stack:
        stop = stop or stack.enter_context(StopWish())
        world.timeout_s = config.comm.timeout_s
        config = world.agree(partial(settled, config))
        stack.enter_context(deterministic(config))
        _set_threads(config, world)
        inputs = _open_inputs(config, world)
        config = with_steps(config, inputs.dataset)
        _check_stop(stop, world)
        origin = find_origin(config, world, inputs)
        if origin and origin.step >= config.run.steps:
            return say_complete(origin, config, world)
        decision = decide(config, world)
        about = about_run(config, world, inputs, origin)
        trainer = stack.enter_context(build_trainer(config, world, inputs, decision, origin))
        opening = opening_lines(config, world, inputs, trainer.model, decision, origin)
        tracking = _tracking(config, world, len(inputs.dataset))
        trainer.participants += _evaluation(config, world, inputs, trainer.model)
        del inputs  # the weights that it can read have been read
        _check_stop(stop, world)
        # Not earlier: whatever is wrong has to be found before anything is written.
        owner = world.agree(partial(open_run, config, origin) if world.rank == 0 else lambda: None)
        stack.enter_context(owner or nullcontext())
        log = stack.enter_context(
            Log(Path(config.run.dir), config.run.steps, opening, trainer.participants, speaks=world.rank == 0)
        )
        saving = _saving(config, world, trainer, about, stop, owner, origin)
        limit = SkipLimit(config.run.max_skipped_steps, origin.about if origin else None)
        trainer.participants += [_trace(config, world, trainer.model), log, tracking, limit, stop, saving]
        _run_steps(trainer, config.run.steps, stop, saving)
        facts = facts_of(config, world, decision, trainer.model)
        if config.run.exact:
            facts |= {"arithmetic": about["arithmetic"], "parameters_digest": saving.parameters_digest()}
        # Saving comes first here: whatever becomes of the rest, the last checkpoint is not to be lost.
        summary = log.summarize(facts | trainer.finish())
        saving.check_end(trainer.done)
        return summary


def with_steps(config: Config, dataset: Data) -> Config:
    """Return a configuration with its number of steps, where it has passes over the data instead. Local."""
    epochs = config.run.num_train_epochs
    if epochs is None:
        return config
    steps = math.ceil(epochs * math.ceil(len(dataset) / drawn_per_step(config)))
    return replace(config, run=replace(config.run, steps=steps, num_train_epochs=None))


def decide(config: Config, world: World) -> Decision:
    """Decide how the ranks of a run reach each other, as `api.decide_for` does. Collective."""
    comm = config.comm
    return decide_for(
        world,
        zero_copy=comm.zero_copy,
        reduction=comm.reduction,
        progress=comm.progress,
        window_device=comm.window_device,
        device=config.run.device,
        tickets=config.data.balance == "dynamic" or config.run.objective == "grpo",
    )


def build_trainer(
    config: Config, world: World, inputs: Inputs, decision: Decision, origin: Origin | None = None
) -> Trainer:
    """Put a trainer together that trains and measures; what else a run does may join its participants. Collective.

    Args:
        config: Of the run.
        world: The ranks.
        inputs: What `open_inputs` returned.
        decision: What `decide` returned.
        origin: The checkpoint to begin at; it is closed.

    Raises:
        AgreedError: The checkpoint is damaged.
    """
    model = _shard(config, world, inputs, decision, origin)
    # torch's other implementations divide elements among threads at places that depend on the cut of a shard.
    fused = True if config.run.exact else None
    optimizer = make_optimizer(config.optim, model.named_shard_parameters(), model.parameter_shapes(), fused=fused)
    windows: PieceWindows | None = None
    if inputs.cutting.sizes is not None:
        in_place = decision.zero_copy.choice == "on"
        windows = PieceWindows(world, inputs.cutting.sizes, in_place=in_place)

    def clock() -> float:
        return perf_counter() - (windows.waited_s if windows else 0.0)

    tickets = Tickets(world) if config.data.balance == "dynamic" else None
    participants: list[Participant] = [Timing(world, model, clock), TrafficReport()]
    source: Source
    objective: Objective
    if isinstance(inputs.dataset, Dataset) and isinstance(inputs.loader, Loader):
        pieces = Pieces(windows) if windows else None
        source = DatasetSource(inputs.dataset, inputs.loader, config.run.seed, tickets, pieces)
        objective = SupervisedFineTuning()
        if config.data.cost == "fitted":
            participants.append(LearnedCost(inputs.dataset, inputs.loader))
    else:
        source, objective, more = learn_from_rewards(config, world, model, inputs, decision)
        participants += more
    if model.fixed_point is not None:
        participants.append(Exponents(model.fixed_point, objective.divisor))
    update = Update(model, optimizer, config)
    done = origin.step if origin else 0
    trainer = Trainer(model, source, objective, update, participants, clock, done)
    if origin:
        world.agree(lambda: _restore(trainer, origin, world.rank))
    return trainer


def _set_threads(config: Config, world: World) -> None:
    cores = world.cores_per_rank()
    if config.run.threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(config.run.threads or cores)


def _open_inputs(config: Config, world: World) -> Inputs:
    world.agree(lambda: require(config.run.report_to or ()) if world.rank == 0 else None)
    world.require_same(dump(config), "the configuration")
    inputs = world.agree(lambda: open_inputs(config, world.rank, world.size))
    for setting, dataset in inputs.datasets.items():
        world.require_same(dataset.digest(), f"{setting}: {dataset.path}")
    if world.local_rank == 0:
        remove_staged(config.data.path)
    return inputs


def _check_stop(stop: StopWish, world: World) -> None:
    """End a run that was asked to stop while it started, as long as nothing is written. Collective."""
    stop.look()
    if any(world.gather_objects(stop.told)):
        raise StoppedError("stopped as asked before the first step: start again to go on")


def _shard(config: Config, world: World, inputs: Inputs, decision: Decision, origin: Origin | None) -> ShardedModel:
    if config.model.compile:
        # Here: it takes a second to import, which nobody else should wait for.
        from odc_mpi.models.compiled import compile_layers

        world.agree(lambda: compile_layers(inputs.model.module))
    base = inputs.model.weights
    weights = PatientWeights(origin.checkpoint, base) if origin else base
    model = shard_model(
        inputs.model.module,
        world,
        # Adapters, in float32, and their base each have their own type.
        param_dtype=None if inputs.model.adapter else getattr(torch, config.model.param_dtype),
        reduce_dtype=reduce_dtype(config),
        activation_checkpointing=config.model.gradient_checkpointing,
        prefetch=config.comm.prefetch,
        weights=weights,
        decision=decision,
        mailbox_bytes=config.comm.mailbox_bytes,
        parameter_cache_bytes=config.comm.parameter_cache_bytes,
        gradient_cache_bytes=config.comm.gradient_cache_bytes,
        device=config.run.device,
        optimizer_device=config.optim.device,
    ).train()
    if isinstance(weights, PatientWeights):
        world.agree(weights.require_intact)
    return model


def _saving(
    config: Config,
    world: World,
    trainer: Trainer,
    about: dict[str, Any],
    stop: StopWish,
    owner: Owner | None,
    origin: Origin | None,
) -> Saving:
    state = TrainingState(trainer.model, trainer.update.optimizer, world.rank, over_base="base" in about)
    best = origin.about.get("best") if origin and origin.own else None

    def about_now() -> dict[str, Any]:
        return {**about, "cost": None, **trainer.state()}  # None: unless a participant learns the cost

    return Saving(config, world, state, about_now, stop, owner, best)


def _run_steps(trainer: Trainer, steps: int, stop: StopWish, saving: Saving) -> None:
    try:
        trainer.start()
        while trainer.done < steps and not stop.agreed:
            trainer.step()
    except TrainingError:
        saving.finish()  # what is written and not yet published would be lost
        raise


def _evaluation(config: Config, world: World, inputs: Inputs, model: ShardedModel) -> list[Participant]:
    if not isinstance(inputs.evaluation, Dataset):
        return []
    # Not the fitted cost of a run that goes on: a cut by it would be another one.
    return [Evaluation(config, world, model, inputs.evaluation, first_cost(config.data, inputs.model))]


def _trace(config: Config, world: World, model: ShardedModel) -> Trace:
    max_tokens = config.data.max_tokens_per_microbatch
    return Trace(world, Path(config.run.dir), model.spans, config.run.trace_steps, max_tokens)


def _tracking(config: Config, world: World, num_entries: int) -> Tracking:
    names = config.run.report_to if world.rank == 0 else None
    # The other ranks wait at the end for rank 0.
    finish_s = min(FINISH_S, world.timeout_s / 2)
    steps_per_epoch = math.ceil(num_entries / drawn_per_step(config))
    return Tracking(names or (), Path(config.run.dir), leaves(asdict(config)), steps_per_epoch, finish_s)


def _restore(trainer: Trainer, origin: Origin, rank: int) -> None:
    TrainingState(trainer.model, trainer.update.optimizer, rank).restore(origin.checkpoint)
    trainer.load_state(origin.about)
    origin.checkpoint.close()

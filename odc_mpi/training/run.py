"""A training run, which `training.train` starts.

    prepare_inputs   check that all ranks have the same inputs, and find the number of steps        collective
    Run              shard the model, build the trainer, restore a checkpoint, lock the directory   collective
    Run.train        run the steps, wait for the last checkpoint, gather totals from all ranks      collective

The training loop calls the hooks of the callbacks in this order:

    StartReport                                 reports how long each start-up phase took
    Objective, Update, MinibatchSource          see `training.loop`
    StepTimes                                   reports times and speed
    IslandMetrics                               reports waits for other islands that share the model
    LossEvaluator, or others for the objective  evaluate sequences, pairs or rewards
    FitCostModel                                fits the loader's cost model
    ExponentCallback                            only with fixed-point gradients
    DiLoCo                                      merges the models of islands that train apart
    PrefixCache                                 makes hidden states of frozen layers visible to all ranks
    UsageMetrics, RunInfo                       add bytes, peak memory, time, epoch, and the ranks
    PushWatch                                   warns of ranks whose gradients deviate from their usual ones
    TraceCallback, RunLogger, TrackerCallback   record the metrics, which are now complete
    NonFiniteReport                             can end the run after the step is logged
    StopRequest, CheckpointCallback             save checkpoints, including one before the run stops on request
"""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from odc_mpi.api import decide_for, shard_model
from odc_mpi.checkpoint.state import TrainingState
from odc_mpi.comm.context_parallel.kv_windows import KVSizes, KVWindows
from odc_mpi.comm.device.device import find_device
from odc_mpi.comm.device.device_memory import device_shard_bytes
from odc_mpi.comm.tickets import Tickets
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.loader import Loader
from odc_mpi.errors import TrainingError
from odc_mpi.models.build import MetaModel
from odc_mpi.models.configuration import flatten_config
from odc_mpi.models.frozen_prefix import prefix_units
from odc_mpi.models.quantization.quantize import share_reads
from odc_mpi.observe.callback import Callback
from odc_mpi.observe.log import RunLogger
from odc_mpi.observe.metrics import Metric
from odc_mpi.observe.push_watch import PushWatch
from odc_mpi.observe.timing import IslandMetrics, StartReport, StepTimes
from odc_mpi.observe.trace import TraceCallback
from odc_mpi.observe.trackers import FINISH_S, TrackerCallback, require_tracker_packages
from odc_mpi.observe.usage import UsageMetrics
from odc_mpi.probe.decision import Decision
from odc_mpi.runtime.world import World
from odc_mpi.shard.fixed_point import FixedPointGradients
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.context import RunContext
from odc_mpi.training.exact import ExponentCallback
from odc_mpi.training.inputs import Inputs, open_inputs, training_flops
from odc_mpi.training.loop import Trainer
from odc_mpi.training.nonfinite import NonFiniteReport
from odc_mpi.training.recipes import recipe_of
from odc_mpi.training.rundir.checkpointing import CheckpointCallback, run_metadata
from odc_mpi.training.rundir.memory_tier import require_memory_room
from odc_mpi.training.rundir.prefix_cache import PrefixCache, open_prefix
from odc_mpi.training.rundir.resume import (
    DeferredErrorWeights,
    ResumePoint,
    check_resume_point,
    open_run,
    resolve_steps,
)
from odc_mpi.training.settings import Config
from odc_mpi.training.source import DamageFoundError, DatasetSource, FitCostModel
from odc_mpi.training.start.run_info import RunInfo, numel, startup_lines
from odc_mpi.training.stop import StopRequest
from odc_mpi.training.update import Update, make_optimizer


class Run:
    """A run that is set up. Construction is collective. `stack` closes its files and releases its directory.

    Raises the errors of `train` that concern the settings, the data and the model, on all ranks of `context.world`.
    """

    def __init__(self, context: RunContext, stack: ExitStack) -> None:
        self._context, config, world, resume_point = context, context.config, context.world, context.resume_point
        self._metadata = run_metadata(config, world, context.inputs, resume_point)
        context.prefix = open_prefix(context, self._metadata)
        self._trainer = trainer = stack.enter_context(build_trainer(context))
        model, run_dir = trainer.model, Path(config.run.dir)
        trainer.callbacks.insert(0, StartReport(world, context.start_times, model.spans))
        startup_text = startup_lines(context)
        tracker_callback = _build_tracker_callback(config, world)
        info = RunInfo(config, world, context.decision, model)
        trainer.callbacks += [_usage_metrics(context), info]
        if config.run.norm_watch:
            trainer.callbacks.append(PushWatch(world, model, config.run.norm_watch))
        require_memory_room(context)
        context.inputs = None  # type: ignore[assignment]  # all weights have been read
        context.check_stop()
        # Last in the setup, because all errors must be raised before anything is written.
        lock = world.run_on_all(partial(open_run, config, resume_point) if world.rank == 0 else lambda: None)
        stack.enter_context(lock or nullcontext())
        self._checkpointing = CheckpointCallback(context, trainer, self._metadata, lock)
        resumed = resume_point.metadata if resume_point else None
        report = NonFiniteReport(config.run, world, model, trainer.objective, resumed)
        max_tokens = config.data.max_tokens_per_microbatch
        trace = TraceCallback(world, run_dir, model.spans, config.run.trace_steps, max_tokens, model.num_islands)
        others: list[Callback] = [tracker_callback, report, context.stop, self._checkpointing]
        declaring, text = [*trainer.callbacks, trace, *others], startup_text if context.prints else None
        self._logger = RunLogger(run_dir, config.run.steps, text, declaring, writes=world.rank == 0)
        stack.callback(self._logger.close)  # before the directory is unlocked
        trainer.callbacks += [trace, self._logger, *others]

    def train(self) -> dict[str, Any]:
        """Train through the last step. Return the contents of summary.json on rank 0, and {} elsewhere. Collective.

        Call `finish` next. Raises the errors of `train` that concern the training.
        """
        context, trainer = self._context, self._trainer
        _run_steps(trainer, context.config.run.steps, context.stop, self._checkpointing)
        described: dict[str, Any] = {}
        if context.config.run.exact:
            digest = self._checkpointing.parameters_digest()
            described = {"arithmetic": self._metadata["arithmetic"], "parameters_digest": digest}
        # `finish` begins with checkpointing, the last callback: an error in another must not lose the checkpoint.
        return self._logger.summarize(described | trainer.finish())

    @property
    def model(self) -> ShardedModel:
        """Model that is trained."""
        return self._trainer.model

    @property
    def declared(self) -> Sequence[Metric]:
        """Declarations of the metrics of the run."""
        return self._logger.declared

    def finish(self, summary: dict[str, Any]) -> None:
        """Print a summary, and raise an error on all ranks if the run was stopped, or its last checkpoint failed."""
        self._logger.print_summary(summary)
        self._checkpointing.raise_outcome(self._trainer.completed_steps)

    def close(self) -> None:
        """Free the windows. Collective. Not for use after an error, since the other ranks may not take part."""
        self._trainer.model.close()


def prepare_inputs(context: RunContext) -> None:
    """Open the inputs, check the checkpoint, and resolve the number of steps. Collective."""
    config, world, resume_point = context.config, context.world, context.resume_point
    context.inputs = _open_inputs(context)
    if resume_point:
        check_resume_point(resume_point, config, world, context.inputs)
    context.config = world.run_on_all(partial(resolve_steps, config, context.inputs, resume_point))


def _build_tracker_callback(config: Config, world: World) -> TrackerCallback:
    names = (config.run.report_to or ()) if world.rank == 0 else ()
    # At the end, the other ranks wait for rank 0.
    finish_s = min(FINISH_S, world.timeout_s / 2)
    return TrackerCallback(names, Path(config.run.dir), flatten_config(asdict(config)), finish_s)


def decide(config: Config, world: World, model: MetaModel | None = None) -> Decision:
    """Choose how the ranks communicate, considering the size of `model` if it is given. Collective."""
    shard_bytes = 0
    if model:
        with_optimizer = config.optim.device == "cuda"
        dtypes = _dtypes(config, model)
        shard_bytes = device_shard_bytes(model.module, world.size, *dtypes, with_optimizer=with_optimizer)
    tickets = config.data.balance == "dynamic" or recipe_of(config).claims_work
    return decide_for(
        world,
        config.comm,
        device=config.run.device,
        shard_bytes=shard_bytes,
        tickets=tickets,
        islands=config.islands.by != "off",
    )


def _dtypes(config: Config, model: MetaModel) -> tuple[torch.dtype | None, torch.dtype]:
    """Return the arguments `param_dtype` and `reduce_dtype` of `shard_model`."""
    # Adapters are float32; their base has its own type.
    param_dtype = None if model.adapter else getattr(torch, config.model.param_dtype)
    return param_dtype, torch.int64 if config.model.reduce_dtype == "fixed64" else torch.float32


def build_trainer(context: RunContext) -> Trainer:
    """Build the trainer for a run. If there is a resume point, restore and close its checkpoint. Collective."""
    config, world, inputs, decision = context.config, context.world, context.inputs, context.decision
    resume_point = context.resume_point
    model = context.model = _shard(context)
    # Other implementations in torch split elements among threads at positions that depend on the shard's size.
    fused = True if config.run.exact else None
    optimizer = context.optimizer = make_optimizer(
        config.optim, model.named_shard_parameters(), model.parameter_shapes(), fused=fused
    )
    windows: KVWindows | None = None
    if isinstance(inputs.context_parallel, KVSizes):
        zero_copy = decision.zero_copy.value == "on"
        device = find_device(config.run.device, world.host_rank)
        windows = KVWindows(world, inputs.context_parallel, shared=zero_copy, device=device)
    times = StepTimes(world, model, lambda: windows.waited_s if windows else 0.0)
    tickets = Tickets(world) if config.data.balance == "dynamic" else None
    parts = recipe_of(config).build(context)
    source, objective = parts.source, parts.objective
    callbacks = [*([IslandMetrics(world, model)] if context.islands else ()), *parts.callbacks]
    if source is None:
        assert isinstance(inputs.dataset, Dataset) and isinstance(inputs.loader, Loader)
        source = DatasetSource(world, inputs.dataset, inputs.loader, config.run.seed, tickets, windows)
        if config.data.cost == "fitted":
            callbacks.append(FitCostModel(inputs.dataset, inputs.loader))
    if isinstance(model.gradient_format, FixedPointGradients):
        callbacks.append(ExponentCallback(model.gradient_format, objective.loss_normalizer))
    update = Update(model, optimizer, config)
    # An island that had finished when others were stopped takes its last step again, with the next minibatch.
    completed_steps = min(resume_point.step, config.run.steps - 1) if resume_point else 0
    trainer = Trainer(model, source, objective, update, times, callbacks, completed_steps)
    context.add_callbacks(trainer)
    if context.prefix:
        trainer.callbacks.append(PrefixCache(context))
    if resume_point:
        world.run_on_all(lambda: _restore(trainer, resume_point, world.rank))
    return trainer


def _open_inputs(context: RunContext) -> Inputs:
    config, world, resume_point = context.config, context.world, context.resume_point
    world.run_on_all(lambda: require_tracker_packages(config.run.report_to or ()) if world.rank == 0 else None)
    stored = resume_point.metadata.get("prompt_time") if resume_point else None
    prompt_time = world.gather_objects(stored or datetime.now().isoformat())[0]
    inputs = world.run_on_all(lambda: open_inputs(config, world.rank, world.size, context.part, prompt_time))
    for setting, dataset in inputs.datasets.items():
        world.require_same(dataset.digest(), f"{setting}: {dataset.path}")
    return inputs


def _shard(context: RunContext) -> ShardedModel:
    config, world, inputs, resume_point = context.config, context.world, context.inputs, context.resume_point
    if config.model.compile:
        # Imported late: it takes a second.
        from odc_mpi.models.compiled import compile_layers

        world.run_on_all(lambda: compile_layers(inputs.model.module))
    weights = inputs.model.weights
    share_reads(inputs.model.base, world)
    if resume_point:
        continues = resume_point.continues_island(context.part)
        weights = DeferredErrorWeights(resume_point.checkpoint, weights, continues=continues)
    param_dtype, reduce_dtype = _dtypes(config, inputs.model)
    module = inputs.model.module
    model = shard_model(
        module,
        world,
        units=prefix_units(module) if inputs.prefix else None,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        activation_checkpointing=config.model.gradient_checkpointing is True,
        weights=weights,
        comm=context.decision,
        islands=context.islands,
        device=config.run.device,
        optimizer_device=config.optim.device,
    ).train()
    if isinstance(weights, DeferredErrorWeights):
        world.run_on_all(weights.raise_deferred_error)
    return model


def _run_steps(trainer: Trainer, steps: int, stop: StopRequest, checkpointing: CheckpointCallback) -> None:
    try:
        trainer.start()
        while trainer.completed_steps < steps and not stop.requested_on_any_rank:
            trainer.step()
    except DamageFoundError:
        checkpointing.save_last_step(trainer.completed_steps)
        checkpointing.on_train_end()
        raise
    except TrainingError:
        checkpointing.on_train_end()  # publish a checkpoint that is still being written
        raise


def _usage_metrics(context: RunContext) -> UsageMetrics:
    config, inputs, model = context.config, context.inputs, context.model
    flops = None
    # The FLOPs of generation are not counted, and peaks are those of bfloat16.
    if recipe_of(config).counts_flops and config.model.param_dtype == "bfloat16":
        flops = training_flops(inputs.model, numel(model, True) / numel(model))
    return UsageMetrics(context.world, model, inputs.loader.num_epochs, flops)


def _restore(trainer: Trainer, resume_point: ResumePoint, rank: int) -> None:
    state = TrainingState(trainer.model, trainer.update.optimizer, rank)
    state.restore(resume_point.checkpoint)
    trainer.load_state_dict(resume_point.metadata)
    for callback in trainer.callbacks:
        callback.load_tensors(partial(state.read, resume_point.checkpoint))
    resume_point.checkpoint.close()

"""A training run, from its configuration to its summary.

    set up    check that all ranks have the same inputs, find the checkpoint, shard the model    collective
    train     run the steps with `training.loop.Trainer`
    finish    wait for the last checkpoint, gather totals from all ranks                         collective

The training loop calls the hooks of the callbacks in this order:

    StartReport                                 reports how long each start-up phase took
    Objective, Update, MinibatchSource          see `training.loop`
    StepTimeMetrics, TrafficReport              report times and bytes
    callbacks for islands                       report their waits, or synchronize those that train separately
    LossEvaluator, or others for the objective  evaluate sequences, pairs or rewards
    FitCostModel                                fits the loader's cost model
    ExponentCallback                            only with fixed-point gradients
    ThroughputMetrics, RunInfo                  add time, epoch, speed per rank, peak memory, and the ranks
    TraceCallback, RunLogger, TrackerCallback   record the metrics, which are now complete
    NonFiniteReport                             can end the run after the step is logged
    StopRequest, CheckpointCallback             save checkpoints, including one before the run stops on request
"""

import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from odc_mpi.api import decide_for, shard_model
from odc_mpi.checkpoint.state import TrainingState
from odc_mpi.comm.context_parallel.kv_windows import KVSizes, KVWindows
from odc_mpi.comm.device.device import find_device
from odc_mpi.comm.device.device_memory import device_shard_bytes
from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.tickets import Tickets
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.loader import Loader
from odc_mpi.errors import StoppedError, TrainingError
from odc_mpi.models.build import MetaModel
from odc_mpi.models.configuration import flatten_config
from odc_mpi.models.token_logps import TokenLogps
from odc_mpi.observe.callback import Callback
from odc_mpi.observe.log import RunLogger
from odc_mpi.observe.timing import IslandMetrics, StartReport, StepTimeMetrics, ThroughputMetrics, TrafficReport
from odc_mpi.observe.trace import TraceCallback
from odc_mpi.observe.trackers import FINISH_S, TrackerCallback, require_tracker_packages
from odc_mpi.probe.decision import CommSettings, Decision
from odc_mpi.runtime.start.start_times import StartTimes
from odc_mpi.runtime.world import World
from odc_mpi.shard.fixed_point import FixedPointGradients
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.evaluation import LossEvaluator, held_out_pass
from odc_mpi.training.exact import ExponentCallback, apply_exact_settings, deterministic_algorithms
from odc_mpi.training.inputs import Inputs, open_inputs, training_flops
from odc_mpi.training.islands.build import (
    build_outer_loop,
    find_outer_loop,
    make_islands,
    resume_weights,
    use_outer_parameters,
)
from odc_mpi.training.islands.state import make_training_state
from odc_mpi.training.loop import MinibatchSource, Objective, Trainer
from odc_mpi.training.nonfinite import NonFiniteReport
from odc_mpi.training.objectives.sft import SFTObjective
from odc_mpi.training.pairs.build import build_dpo, build_reward
from odc_mpi.training.resolved_settings import resolve_settings
from odc_mpi.training.rl.build import build_grpo
from odc_mpi.training.run_info import RunInfo, numel, startup_lines
from odc_mpi.training.rundir.checkpointing import CheckpointCallback, run_metadata, state_digest
from odc_mpi.training.rundir.resume import (
    DeferredErrorWeights,
    ResumePoint,
    check_resume_point,
    find_resume_point,
    open_run,
    report_already_complete,
    resolve_steps,
)
from odc_mpi.training.settings import Config, dump
from odc_mpi.training.source import DamageFoundError, DatasetSource, FitCostModel
from odc_mpi.training.stop import StopRequest
from odc_mpi.training.update import Update, make_optimizer


def train(
    config: Config, world: World, stop: StopRequest | None = None, start_times: StartTimes | None = None
) -> dict[str, Any]:
    """Train from the first step, or from a checkpoint, through the last step. Collective.

    `stop` is a stop request handler that is already active. By default, a new one is active during this call.
    `start_times` contains the durations of earlier start-up phases. Returns the contents of summary.json, or only
    `steps` if the run was already complete, on all ranks.

    Raises:
        AllRanksUserError: The settings, data and model do not match or differ between ranks, or a file cannot be used.
        UserError: A reward function failed on this rank.
        DamageFoundError: A sequence could not be read. The last complete step, if any, is saved.
        TrainingError: Too many consecutive steps (with `run.detect_anomaly`, a single step) had non-finite gradients,
            or the last checkpoint could not be written.
        StoppedError: The run was stopped on request. If training had begun, a checkpoint was saved.
    """
    with ExitStack() as stack:
        stop = stop or stack.enter_context(StopRequest())
        start_times = start_times or StartTimes(perf_counter())
        world.timeout_s = config.comm.timeout_s
        world.require_same(dump(config), "the configuration")
        check_stop = partial(_check_stop, stop, world)
        config, notes = resolve_settings(config, world, check_stop)
        config = world.run_on_all(partial(apply_exact_settings, config))
        stack.enter_context(deterministic_algorithms(config))
        _set_threads(config, world)
        islands = make_islands(config, world)
        resume_point = find_resume_point(config, world)
        inputs = _open_inputs(config, world, islands, resume_point)
        if resume_point:
            check_resume_point(resume_point, config, world, inputs)
        config = world.run_on_all(partial(resolve_steps, config, inputs, resume_point))
        check_stop()
        if resume_point and resume_point.step >= config.run.steps:
            if islands:
                islands.close()
            return report_already_complete(resume_point, config, world)
        start_times.end("inputs")
        decision = decide(config, world, inputs.model)
        start_times.end("probe")
        metadata = run_metadata(config, world, inputs, resume_point)
        trainer = stack.enter_context(build_trainer(config, world, inputs, decision, resume_point, check_stop, islands))
        model = trainer.model
        trainer.callbacks.insert(0, StartReport(world, start_times, model.spans))
        startup_text = startup_lines(config, world, inputs, model, decision, resume_point, notes)
        run_dir = Path(config.run.dir)
        tracker_callback = _build_tracker_callback(config, world)
        info = RunInfo(config, world, decision, model)
        trainer.callbacks += [_build_throughput_metrics(config, world, inputs, model), info]
        outer_loop = use_outer_parameters(trainer.callbacks)
        del inputs  # all weights have been read
        check_stop()
        # Last in the setup, because all errors must be raised before anything is written.
        lock = world.run_on_all(partial(open_run, config, resume_point) if world.rank == 0 else lambda: None)
        stack.enter_context(lock or nullcontext())
        checkpointing = CheckpointCallback(config, world, trainer, metadata, stop, lock, resume_point, outer_loop)
        resumed = resume_point.metadata if resume_point else None
        report = NonFiniteReport(config.run, world, model, trainer.objective, resumed)
        max_tokens = config.data.max_tokens_per_microbatch
        trace = TraceCallback(world, run_dir, model.spans, config.run.trace_steps, max_tokens, model.num_islands)
        others: list[Callback] = [tracker_callback, report, stop, checkpointing]
        declaring = [*trainer.callbacks, trace, *others]
        logger = RunLogger(run_dir, config.run.steps, startup_text, declaring, is_main_rank=world.rank == 0)
        stack.callback(logger.close)  # before the directory is unlocked
        trainer.callbacks += [trace, logger, *others]
        _run_steps(trainer, config.run.steps, stop, checkpointing)
        described: dict[str, Any] = {}
        if config.run.exact:
            described = {"arithmetic": metadata["arithmetic"], "parameters_digest": checkpointing.parameters_digest()}
        # `finish` begins with checkpointing, the last callback: an error in another must not lose the checkpoint.
        summary = world.gather_objects(logger.summarize(described | trainer.finish()))[0]
        checkpointing.raise_outcome(trainer.completed_steps)
        if outer_loop:
            outer_loop.close()
        model.close()  # not after an error, since the other ranks may not take part
        return summary


def _set_threads(config: Config, world: World) -> None:
    cores = world.cores_per_rank()  # collective
    if config.run.threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(config.run.threads or cores)


def _build_tracker_callback(config: Config, world: World) -> TrackerCallback:
    names = (config.run.report_to or ()) if world.rank == 0 else ()
    # At the end, the other ranks wait for rank 0.
    finish_s = min(FINISH_S, world.timeout_s / 2)
    return TrackerCallback(names, Path(config.run.dir), flatten_config(asdict(config)), finish_s)


def decide(config: Config, world: World, model: MetaModel | None = None) -> Decision:
    """Choose how the ranks communicate, considering the size of `model` if it is given. Collective."""
    settings = CommSettings(**{item.name: getattr(config.comm, item.name) for item in fields(CommSettings)})
    if config.islands.by != "off" and config.run.device == "cuda":
        settings = replace(settings, window_device="cpu")
    shard_bytes = 0
    if model:
        with_optimizer = config.optim.device == "cuda"
        dtypes = _dtypes(config, model)
        shard_bytes = device_shard_bytes(model.module, world.size, *dtypes, with_optimizer=with_optimizer)
    tickets = config.data.balance == "dynamic" or config.run.objective == "grpo"
    return decide_for(world, settings, device=config.run.device, shard_bytes=shard_bytes, tickets=tickets)


def _dtypes(config: Config, model: MetaModel) -> tuple[torch.dtype | None, torch.dtype]:
    """Return the arguments `param_dtype` and `reduce_dtype` of `shard_model`."""
    # Adapters are float32; their base has its own type.
    param_dtype = None if model.adapter else getattr(torch, config.model.param_dtype)
    return param_dtype, torch.int64 if config.model.reduce_dtype == "fixed64" else torch.float32


def build_trainer(
    config: Config,
    world: World,
    inputs: Inputs,
    decision: Decision,
    resume_point: ResumePoint | None = None,
    check_stop: Callable[[], None] = lambda: None,
    islands: Islands | None = None,
) -> Trainer:
    """Build the trainer for a run. If `resume_point` is given, restore and close its checkpoint. Collective.

    `check_stop`, which may raise an error on all ranks, is called while a DPO run computes reference log-probabilities.
    """
    islands = islands or make_islands(config, world)
    trains_separately = islands is not None and islands.mode == "outer"
    model = _shard(config, world, inputs, decision, resume_point, islands)
    # Other implementations in torch split elements among threads at positions that depend on the shard's size.
    fused = True if config.run.exact else None
    optimizer = make_optimizer(config.optim, model.named_shard_parameters(), model.parameter_shapes(), fused=fused)
    windows: KVWindows | None = None
    if isinstance(inputs.context_parallel, KVSizes):
        zero_copy = decision.zero_copy.value == "on"
        device = find_device(config.run.device, world.host_rank)
        windows = KVWindows(world, inputs.context_parallel, shared=zero_copy, device=device)

    def clock() -> float:
        return perf_counter() - (windows.waited_s if windows else 0.0)

    sharing = islands.island if islands and trains_separately else world
    tickets = Tickets(sharing) if config.data.balance == "dynamic" else None
    callbacks: list[Callback] = [StepTimeMetrics(world, model, clock), TrafficReport()]
    if islands and trains_separately:
        callbacks.append(build_outer_loop(config, world, model, islands))
    elif islands:
        callbacks.append(IslandMetrics(world, model))
    source: MinibatchSource
    objective: Objective
    if isinstance(inputs.dataset, Dataset) and isinstance(inputs.loader, Loader):
        source = DatasetSource(world, inputs.dataset, inputs.loader, config.run.seed, tickets, windows)
        if config.run.objective == "dpo":
            digest = partial(state_digest, world, TrainingState(model, optimizer, world.rank))
            objective, others = build_dpo(config, world, model, inputs, resume_point, digest, check_stop)
        elif config.run.objective == "reward":
            objective, others = build_reward(config, world, model, inputs)
        else:
            objective, held_out = SFTObjective(model.module), held_out_pass(config, world, model, inputs)
            others = [LossEvaluator(config.run, model, held_out, TokenLogps(model.module))] if held_out else []
        if config.data.cost == "fitted":
            others.append(FitCostModel(inputs.dataset, inputs.loader))
    else:
        source, objective, others = build_grpo(config, world, model, inputs, decision)
    callbacks += others
    if isinstance(model.gradient_format, FixedPointGradients):
        callbacks.append(ExponentCallback(model.gradient_format, objective.loss_normalizer))
    update = Update(model, optimizer, config)
    completed_steps = resume_point.step if resume_point else 0
    trainer = Trainer(model, source, objective, update, callbacks, clock, completed_steps)
    if resume_point:
        world.run_on_all(lambda: _restore(trainer, resume_point, world.rank))
    return trainer


def _open_inputs(config: Config, world: World, islands: Islands | None, resume_point: ResumePoint | None) -> Inputs:
    world.run_on_all(lambda: require_tracker_packages(config.run.report_to or ()) if world.rank == 0 else None)
    num_islands = islands.size if islands and islands.mode == "outer" else 1
    stored = resume_point.metadata.get("prompt_time") if resume_point else None
    prompt_time = world.gather_objects(stored or datetime.now().isoformat())[0]
    inputs = world.run_on_all(lambda: open_inputs(config, world.rank, world.size, num_islands, prompt_time))
    for setting, dataset in inputs.datasets.items():
        world.require_same(dataset.digest(), f"{setting}: {dataset.path}")
    # Delete the copy that the batch script made for this job. All ranks of the node have opened it, so no copy is left
    # behind, however the job ends.
    if world.local_rank == 0 and os.environ.get("ODC_MPI_STAGED_FILE") == config.data.path:
        Path(config.data.path).unlink(missing_ok=True)
    return inputs


def _check_stop(stop: StopRequest, world: World) -> None:
    """Raise `StoppedError` if a stop was requested before the first step. Collective."""
    stop.poll_stop_file()
    if any(world.gather_objects(stop.requested)):
        raise StoppedError("stopped on request before the first step. Run the same command to start again")


def _shard(
    config: Config,
    world: World,
    inputs: Inputs,
    decision: Decision,
    resume_point: ResumePoint | None,
    islands: Islands | None,
) -> ShardedModel:
    if config.model.compile:
        # Imported late: it takes a second.
        from odc_mpi.models.compiled import compile_layers

        world.run_on_all(lambda: compile_layers(inputs.model.module))
    weights = inputs.model.weights
    if resume_point:
        weights = resume_weights(resume_point.checkpoint, weights, islands)
    param_dtype, reduce_dtype = _dtypes(config, inputs.model)
    model = shard_model(
        inputs.model.module,
        world,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        activation_checkpointing=config.model.gradient_checkpointing is True,
        prefetch=config.comm.prefetch,
        weights=weights,
        decision=decision,
        parameter_cache_bytes=config.comm.parameter_cache_bytes,
        gradient_cache_bytes=config.comm.gradient_cache_bytes,
        islands=islands,
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


def _build_throughput_metrics(config: Config, world: World, inputs: Inputs, model: ShardedModel) -> ThroughputMetrics:
    flops = None
    # The FLOPs of generation are not counted, and peaks are those of bfloat16.
    if config.run.objective == "sft" and config.model.param_dtype == "bfloat16":
        flops = training_flops(inputs.model, numel(model, True) / numel(model))
    return ThroughputMetrics(world.size, model.device, inputs.loader.num_epochs, flops)


def _restore(trainer: Trainer, resume_point: ResumePoint, rank: int) -> None:
    outer_loop = find_outer_loop(trainer.callbacks)
    state = make_training_state(trainer.model, trainer.update.optimizer, rank, outer_loop)
    state.restore(resume_point.checkpoint)
    trainer.load_state_dict(resume_point.metadata)
    resume_point.checkpoint.close()

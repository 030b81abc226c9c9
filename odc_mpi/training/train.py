"""`train`: checks the configuration, finds the checkpoint, and starts the run, or one run on each island."""

import os
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any

import torch

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.errors import StoppedError
from odc_mpi.runtime.start.start_times import StartTimes
from odc_mpi.runtime.world import World
from odc_mpi.training.context import RunContext
from odc_mpi.training.exact import apply_exact_settings, deterministic_algorithms
from odc_mpi.training.islands.apart import train_apart
from odc_mpi.training.run import Run, decide, prepare_inputs
from odc_mpi.training.rundir.memory_tier import remove_leftovers
from odc_mpi.training.rundir.resume import find_resume_point, report_already_complete
from odc_mpi.training.settings import Config, dump
from odc_mpi.training.start.resolved_settings import resolve_settings
from odc_mpi.training.stop import StopRequest


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
        DamageFoundError: A sequence could not be read. The last complete step, if any, is saved, unless islands train
            apart, which save only after merges.
        TrainingError: Too many consecutive steps (with `run.detect_anomaly`, a single step) had non-finite gradients,
            or the last checkpoint could not be written.
        StoppedError: The run was stopped on request. If training had begun, a checkpoint was saved.
    """
    with ExitStack() as stack:
        stop = stop or stack.enter_context(StopRequest())
        world.timeout_s = config.comm.timeout_s
        world.require_same(dump(config), "the configuration")
        check_stop = partial(_check_stop, stop, world)
        config, notes = resolve_settings(config, world, check_stop)
        config = world.run_on_all(partial(apply_exact_settings, config))
        stack.enter_context(deterministic_algorithms(config))
        _set_threads(config, world)
        context = RunContext(config, world, stop, start_times or StartTimes(perf_counter()), notes, check_stop)
        islands = _make_islands(config, world)
        if islands and config.islands.train_apart:
            return train_apart(context, islands, stack)
        context.islands = islands
        context.resume_point = find_resume_point(config, world)
        prepare_inputs(context)
        check_stop()
        if context.resume_point and context.resume_point.step >= context.config.run.steps:
            if islands:
                islands.close()
            remove_leftovers(context.config.run, world)  # of a start that was killed after its last checkpoint
            return report_already_complete(context.resume_point, context.config, world)
        context.start_times.end("inputs")
        context.decision = decide(context.config, world, context.inputs.model)
        context.start_times.end("probe")
        run = Run(context, stack)
        summary = world.gather_objects(run.train())[0]
        run.finish(summary)
        run.close()
        return summary


def _make_islands(config: Config, world: World) -> Islands | None:
    """Divide the ranks into islands. Return None if the settings turn islands off or there is only one. Collective."""
    if config.islands.by == "off":
        return None
    islands = Islands(world, config.islands.by)
    if islands.size == 1:
        islands.close()
        return None
    return islands


def _set_threads(config: Config, world: World) -> None:
    cores = world.cores_per_rank()  # collective
    if config.run.threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(config.run.threads or cores)


def _check_stop(stop: StopRequest, world: World) -> None:
    """Raise `StoppedError` if a stop was requested before the first step. Collective."""
    stop.poll_stop_file()
    if any(world.gather_objects(stop.requested)):
        raise StoppedError("stopped on request before the first step. Run the same command to start again")

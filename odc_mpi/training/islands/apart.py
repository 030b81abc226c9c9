"""Training on islands that train apart: an ordinary run on each island, and the summary of all."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.islands.merges import MergeError
from odc_mpi.data.loader import Part
from odc_mpi.errors import AllRanksUserError, StoppedError, TrainingError, UserError
from odc_mpi.islands.norms import ChangeRule
from odc_mpi.islands.quorum import Quorum
from odc_mpi.islands.run_dir import ISLANDS, MERGES, write_size
from odc_mpi.observe.metrics import Summary, read_run_metrics, write_declarations, write_summary
from odc_mpi.runtime.abort import abort
from odc_mpi.training.context import RunContext
from odc_mpi.training.evaluation import PeriodicEvaluator
from odc_mpi.training.islands.diloco import DiLoCo
from odc_mpi.training.loop import Trainer
from odc_mpi.training.run import Run, decide, prepare_inputs
from odc_mpi.training.rundir.resume import find_resume_point, open_run, report_already_complete
from odc_mpi.training.rundir.run_dir_lock import RunDirectoryLock
from odc_mpi.training.settings import Config
from odc_mpi.training.start.run_info import RunInfo, describe_islands

#: Settings that are not arguments of `DiLoCo`. The others have the same names, except for a prefix `outer_`.
_NO_OPTIONS = {"by", "mode", "sync_when", "change", "quorum", "grace_s"}
#: Minimum number of checkpoints that an island keeps, because the other islands may be up to two saves behind.
_MIN_CHECKPOINTS = 3


def train_apart(context: RunContext, islands: Islands, stack: ExitStack) -> dict[str, Any]:
    """Run a training on each island, and return the summary of all, on all ranks. Collective.

    `stack` closes the files. For errors, see `train`. If one island fails during the training, the job ends.
    """
    config, world = context.config, context.world
    world.run_on_all(lambda: _check_quorum(config, islands.size))
    context.resume_point = find_resume_point(config, world, islands)
    own = replace(
        context,
        config=_config_of_island(config, islands.index),
        world=islands.island,
        check_stop=lambda: None,  # the islands agree to stop after the first step
        part=Part(islands.index, islands.size),
        prints=islands.index == 0,
        notes={**context.notes, "islands": _describe(config, islands)},
    )
    world.run_on_all(lambda: prepare_inputs(own))
    context.config = replace(config, run=replace(own.config.run, dir=config.run.dir))
    context.check_stop()
    if _is_complete(context):
        assert context.resume_point
        islands.close()
        return report_already_complete(context.resume_point, context.config, world)
    context.start_times.end("inputs")
    context.decision = own.decision = decide(context.config, world, own.inputs.model)
    context.start_times.end("probe")
    lock = world.run_on_all(lambda: _open(context, islands.size) if world.rank == 0 else None)
    stack.enter_context(lock or nullcontext())
    loops: list[DiLoCo] = []
    own.add_callbacks = lambda trainer: loops.append(add_diloco(own, islands, trainer))
    run = world.run_on_all(lambda: Run(own, stack))
    if world.rank == 0:
        write_declarations(Path(config.run.dir), run.declared)
    with _failure_ends_job(islands):
        summary = run.train()
    if world.rank == 0:
        summary = _summarize(context, islands, run, summary)
    stopped = None
    with _failure_ends_job(islands):
        try:
            run.finish(summary)
        except StoppedError as error:
            stopped = error
    if outcomes := [each for each in world.gather_objects(stopped) if each]:
        raise outcomes[0]
    loops[0].free()
    run.close()
    islands.close()
    if world.rank == 0:
        shutil.rmtree(Path(config.run.dir) / ISLANDS / MERGES, ignore_errors=True)
    return world.gather_objects(summary)[0]


def _config_of_island(config: Config, index: int) -> Config:
    keep = config.run.keep_checkpoints and max(_MIN_CHECKPOINTS, config.run.keep_checkpoints)
    directory = str(Path(config.run.dir) / ISLANDS / str(index))
    return replace(config, run=replace(config.run, dir=directory, keep_checkpoints=keep))


def _describe(config: Config, islands: Islands) -> str:
    settings = config.islands
    when = "at the latest " if settings.sync_when == "change" else ""
    return (
        f"{describe_islands(islands.size, islands.island.size)}; train apart, merged {when}every "
        f"{settings.sync_every} steps in {settings.wire}; below: island 0"
    )


def _check_quorum(config: Config, num_islands: int) -> None:
    if config.islands.quorum > num_islands:
        raise UserError(
            f"islands.quorum: expected at most {num_islands}, the number of islands, got {config.islands.quorum}"
        )


def _is_complete(context: RunContext) -> bool:
    """Return True if all islands have taken all steps. Collective."""
    completed = context.world.gather_objects(context.resume_point.step if context.resume_point else 0)
    return min(completed) >= context.config.run.steps


def _open(context: RunContext, num_islands: int) -> RunDirectoryLock:
    lock = open_run(context.config, context.resume_point)
    write_size(Path(context.config.run.dir), num_islands)
    decisions = Path(context.config.run.dir) / ISLANDS / MERGES
    shutil.rmtree(decisions, ignore_errors=True)
    if context.config.islands.quorum:
        decisions.mkdir()
    return lock


def add_diloco(context: RunContext, islands: Islands, trainer: Trainer) -> DiLoCo:
    """Add the callback that the settings describe, whose parameters the evaluators evaluate. Collective."""
    settings, run = context.config.islands, context.config.run
    options = {key.removeprefix("outer_"): value for key, value in asdict(settings).items() if key not in _NO_OPTIONS}
    rule = ChangeRule(settings.change) if settings.sync_when == "change" else None
    decisions = Path(run.dir).parent / MERGES
    quorum = Quorum(settings.quorum, settings.grace_s, decisions) if 0 < settings.quorum < islands.size else None
    loop = DiLoCo(
        islands,
        trainer.model,
        **options,
        quorum=quorum,
        rule=rule,
        num_steps=run.steps,
        stop=context.stop,
        checkpoint_every=run.checkpoint_every,
    )
    for callback in trainer.callbacks:
        if isinstance(callback, PeriodicEvaluator):
            callback.evaluated_parameters = loop.outer_parameters
    trainer.callbacks.append(loop)
    return loop


@contextmanager
def _failure_ends_job(islands: Islands) -> Iterator[None]:
    """Context manager that ends the job if an error is raised by all ranks of this island, but not of the others."""
    try:
        yield
    except MergeError:  # raised by all islands
        raise
    except (AllRanksUserError, TrainingError) as error:
        if islands.island.rank == 0:
            abort(f"island {islands.index}: {error}", code=2 if isinstance(error, AllRanksUserError) else 1)
        islands.island.gather_objects(None)  # the job ends first


def _summarize(context: RunContext, islands: Islands, run: Run, of_first_island: dict[str, Any]) -> dict[str, Any]:
    """Write and return the summary of all islands: that of the first island, with the metrics of all."""
    run_dir = Path(context.config.run.dir)
    reduced = Summary(run.declared, read_run_metrics(run_dir, context.config.run.steps)).finish({})
    info = RunInfo(context.config, context.world, context.decision, run.model).on_train_end()
    described = info | {"num_islands": islands.size, "elapsed_s": of_first_island["elapsed_s"]}
    summary = {**of_first_island, **reduced, **described}
    write_summary(run_dir, summary)
    return summary

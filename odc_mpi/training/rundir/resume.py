"""Where a run begins: at its start, or at a checkpoint, whose ranks may have been others. Collective, at start-up."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from odc_mpi.checkpoint.manifest import CHECKPOINTS, VersionError, steps_in
from odc_mpi.checkpoint.publish import recover_retired, retired
from odc_mpi.checkpoint.reader import Checkpoint, checkpoint_directories
from odc_mpi.checkpoint.state import CheckpointWeights, require_model, require_optimizer, restore_buffers
from odc_mpi.errors import AllRanksUserError, UserError, warn
from odc_mpi.models.build import MetaModel
from odc_mpi.models.configuration import first_difference, flatten_config, full_configuration
from odc_mpi.models.weights import check_base
from odc_mpi.observe.terminal import terminal_width
from odc_mpi.runtime.job_info import slurm_job
from odc_mpi.runtime.world import World
from odc_mpi.shard.local_shards import WeightSource
from odc_mpi.training.inputs import Inputs
from odc_mpi.training.rundir.records import has_records, open_run_directory, reopen_run_directory
from odc_mpi.training.rundir.run_dir_lock import RunDirectoryLock, convert_write_errors, lock_run_directory
from odc_mpi.training.settings import Config, defaults, dump

#: torch's classes of optim.optimizer.
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}
#: Settings that may change without a word.
_PRIVATE = {
    *("run.dir", "run.log_dir", "run.resume", "run.report_to", "run.checkpoint_every", "run.keep_checkpoints"),
    "comm.timeout_s",
}
_START_OVER_HINT = "set run.resume to never, or choose another run.dir, to start anew"


@dataclass
class ResumePoint:
    """The checkpoint that a run begins at.

    Attributes:
        checkpoint: Open.
        continues_this_run: Whether it is one of run.dir: then the run goes on, else it is a new one.
        path: What run.resume named when the run began; None if it began anew.
    """

    checkpoint: Checkpoint
    continues_this_run: bool
    path: str | None

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.checkpoint.step

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the run told of itself when it saved."""
        return self.checkpoint.manifest.metadata

    def one_line(self, config: Config) -> str:
        """Say where the run begins, and which settings are others than before."""
        # A version before may not have had a setting, and did what is its default now.
        before, now = defaults() | flatten_config(self.metadata["config"]), flatten_config(asdict(config))
        changed = [
            f"{key} {before.get(key)} -> {now.get(key)}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and key not in _PRIVATE
        ]
        tail = f"; changed since: {', '.join(changed)}" if changed else ""
        return f"after step {self.step}, from {self.checkpoint.directory}, saved by {_ranks(self.checkpoint)}{tail}"


class DeferredErrorWeights:
    """Parameters from a checkpoint; one that is damaged is told when all ranks have read theirs, so that all hear it.

    Args:
        checkpoint: Stays open while weights are read.
        base: Of parameters that belong to the base of adapters.
    """

    def __init__(self, checkpoint: Checkpoint, base: WeightSource) -> None:
        self._weights = CheckpointWeights(checkpoint, base if "base" in checkpoint.manifest.metadata else None)
        self._error: UserError | None = None

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `shard.local_shards.WeightSource`."""
        try:
            return self._weights.read(name, start, stop)
        except UserError as error:
            self._error = self._error or error
            return torch.zeros(stop - start)

    def raise_deferred_error(self) -> None:
        """Check that all that was read is what was written.

        Raises:
            UserError: Some of it is damaged.
        """
        if self._error:
            raise self._error


def find_resume_point(config: Config, world: World, inputs: Inputs) -> ResumePoint | None:
    """Find the checkpoint that a run is to begin at; None if it begins anew. Collective.

    Args:
        config: Of the run.
        world: The ranks.
        inputs: Must fit the checkpoint; the model gets its buffers.

    Raises:
        AgreedError: There should be a checkpoint, and none is usable, or it does not fit.
    """
    resume_point = _find_checkpoint(config, world)
    if resume_point:
        world.run_on_all(lambda: _check_fits(resume_point, config, inputs))
        base = inputs.model.base
        if base is not None:
            world.run_on_all(lambda: check_base(base, resume_point.metadata["base"], world.rank, world.size))
        world.run_on_all(lambda: restore_buffers(inputs.model.module, resume_point.checkpoint))
    return resume_point


def open_run(config: Config, resume_point: ResumePoint | None) -> RunDirectoryLock:
    """Make the run directory ready, and this run the one that writes there. Local; for rank 0.

    Raises:
        UserError: It cannot be written, another run writes there, or the environment asks for something that there is
            not.
    """
    terminal_width()  # a wrong ODC_MPI_PROGRESS shows here
    run_dir = Path(config.run.dir)
    directory_lock = lock_run_directory(run_dir, config.comm.timeout_s)
    if resume_point and resume_point.continues_this_run:
        reopen_run_directory(run_dir, dump(config), resume_point.step)
    else:
        open_run_directory(run_dir, dump(config))
    return directory_lock


def fresh_start_line(config: Config) -> str:
    """Return a line for a run that looked for a checkpoint of its own and found none, to print.

    It is empty where nobody expects one: nothing is saved, and there was no run in run.dir.
    """
    run_dir = Path(config.run.dir)
    expected = config.run.checkpoint_every or has_records(run_dir)
    if config.run.resume != "auto" or not expected:
        return ""
    return f"beginning anew: no checkpoint in {run_dir / CHECKPOINTS}"


def report_already_complete(resume_point: ResumePoint, config: Config, world: World) -> dict[str, Any]:
    """Say that there is nothing to do, and return a summary."""
    resume_point.checkpoint.close()
    if world.rank == 0:
        print(
            f"nothing left to do: {config.run.dir} is at step {resume_point.step} of {config.run.steps}; raise run.steps to "
            "go on, set run.resume to never to start anew",
            flush=True,
        )
    return {"steps": resume_point.step}


def _find_checkpoint(config: Config, world: World) -> ResumePoint | None:
    requested, run_dir = config.run.resume, Path(config.run.dir)
    job = slurm_job()
    if requested == "never" and not job.get("slurm_restarts"):
        return None
    candidates = world.run_on_all(lambda: _list_checkpoints(run_dir, world.rank, config.comm.timeout_s))
    if requested not in ("never", "auto"):
        return _find_requested(world, requested, run_dir, candidates)
    newest = _newest(world, candidates)
    # With never: the same run, which the scheduler started once more; another's checkpoint is none of it.
    if newest and (requested == "auto" or newest.manifest.metadata.get("slurm_job_id") == job["slurm_job_id"]):
        return ResumePoint(newest, True, newest.manifest.metadata["origin"])
    if newest:
        newest.close()
    return None


def _find_requested(world: World, requested: str, run_dir: Path, candidates: Sequence[Path]) -> ResumePoint:
    """Return the checkpoint to begin at, or the run's own newest if it began there. Collective."""
    try:
        newest = _newest(world, candidates)
    except AllRanksUserError as error:
        newest = None  # what was asked for lies elsewhere
        if world.rank == 0:
            reason = str(error).removesuffix(f"; {_START_OVER_HINT}")
            warn(f"WARNING: {run_dir} has checkpoints and none to go on from ({reason}): beginning at {requested}")
    path = str(Path(requested).resolve())
    if newest and newest.manifest.metadata["origin"] == path:
        return ResumePoint(newest, True, path)  # begun there, and started once more: a scheduler does that
    if newest:
        newest.close()
    found = _newest(world, world.run_on_all(lambda: checkpoint_directories(Path(requested))))
    assert found, "directories() finds one, or raises"
    return ResumePoint(found, found.directory.resolve().parent == (run_dir / CHECKPOINTS).resolve(), path)


def _list_checkpoints(run_dir: Path, rank: int, timeout_s: float) -> list[Path]:
    with convert_write_errors(run_dir):
        if rank == 0 and retired(run_dir / CHECKPOINTS):
            # Another run may be about to give the name to a newer checkpoint.
            with lock_run_directory(run_dir, timeout_s):
                recover_retired(run_dir / CHECKPOINTS)
        return list(steps_in(run_dir / CHECKPOINTS).values())


def _check_fits(resume_point: ResumePoint, config: Config, inputs: Inputs) -> None:
    checkpoint, metadata = resume_point.checkpoint, resume_point.metadata
    _require_adapters(resume_point, inputs.model)
    require_model(checkpoint, inputs.model.module)
    # Models of the same shapes may compute something else: heads, positions, activations and the like.
    if difference := first_difference(metadata, full_configuration(inputs.model.module)):
        key, theirs, ours = difference
        raise UserError(
            f"the checkpoint {checkpoint.directory} is of another model: {key} is {theirs!r} there, {ours!r} in "
            "this one: change model.*, or set run.resume to never, or run.dir"
        )
    require_optimizer(checkpoint, OPTIMIZERS[config.optim.optimizer])
    if metadata["data_digest"] != inputs.dataset.digest():
        raise UserError(
            f"the checkpoint {checkpoint.directory} was trained on other data than data.path: {config.data.path}, "
            f"namely {metadata['config']['data']['path']}: change data.path; or {_START_OVER_HINT}"
        )
    if metadata["config"]["run"]["seed"] != config.run.seed:
        raise UserError(
            f"run.seed: expected {metadata['config']['run']['seed']}, the order of the data in the checkpoint "
            f"{checkpoint.directory}, got {config.run.seed}: change run.seed; or {_START_OVER_HINT}"
        )
    if not resume_point.continues_this_run and resume_point.step >= config.run.steps:
        raise UserError(
            f"run.steps: expected more than the {resume_point.step} that {checkpoint.directory} has behind it, got "
            f"{config.run.steps}: raise run.steps"
        )


def _require_adapters(resume_point: ResumePoint, model: MetaModel) -> None:
    """Check that the checkpoint and the run both have adapters of the same strength, or none."""
    theirs, ours = resume_point.metadata.get("adapter"), model.adapter
    if (theirs is None) != (ours is None):
        found, got = ("a whole model", "adapters") if theirs is None else ("adapters", "no lora.r")
        raise UserError(
            f"the checkpoint {resume_point.checkpoint.directory} is of {found}, got {got}: set lora.* as that run had it, or "
            f"to begin anew, {_START_OVER_HINT}"
        )
    for setting, name in (("lora.r", "r"), ("lora.alpha", "lora_alpha")):
        if theirs and ours and theirs[name] != ours[name]:
            raise UserError(
                f"{setting}: expected {theirs[name]}, as in the checkpoint {resume_point.checkpoint.directory}, got "
                f"{ours[name]}: change {setting}; or {_START_OVER_HINT}"
            )


def _newest(world: World, candidates: Sequence[Path]) -> Checkpoint | None:
    """Open the newest of some checkpoints that is whole; each rank looks at some of its files."""
    # Rank 0's: a file system may show the others a newer one a moment later.
    candidates = [Path(path) for path in world.gather_objects([str(path) for path in candidates])[0]]
    problems: list[str] = []
    for path in reversed(candidates):
        checkpoint, problem = world.run_on_all(lambda path=path: _open_checkpoint(path, world))  # type: ignore[misc]
        found = world.gather_objects(problem)
        if not any(found):
            return checkpoint
        problems.append(next(filter(None, found)))
        if checkpoint:
            checkpoint.close()
        if world.rank == 0:
            print(f"odc_mpi: WARNING: {problems[-1]}: looking for an older checkpoint", flush=True)
    if problems:
        raise AllRanksUserError(
            f"run.resume: expected a complete checkpoint, got none among {len(problems)}: {problems[0]}; {_START_OVER_HINT}"
        )
    return None


def _open_checkpoint(path: Path, world: World) -> tuple[Checkpoint | None, str | None]:
    try:
        checkpoint = Checkpoint(path)
    except VersionError:
        raise
    except UserError as error:
        return None, str(error)
    return checkpoint, checkpoint.check_files(range(world.rank, checkpoint.manifest.size, world.size))


def _ranks(checkpoint: Checkpoint) -> str:
    return "1 rank" if checkpoint.manifest.size == 1 else f"{checkpoint.manifest.size} ranks"

"""Start of a run from scratch or from a checkpoint, which may have been saved by a different number of ranks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from odc_mpi.checkpoint.groups import checkpoint_groups
from odc_mpi.checkpoint.manifest import CHECKPOINTS, VersionError, steps_in
from odc_mpi.checkpoint.publish import recover_retired, recoverable_checkpoints
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.state import CheckpointWeights, require_model, restore_buffers
from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.settings import CommConfig
from odc_mpi.data.loader import Part
from odc_mpi.errors import AllRanksUserError, UserError, warn
from odc_mpi.islands.run_dir import island_directories
from odc_mpi.models.adapters.check import check_base, check_quantization
from odc_mpi.models.configuration import first_difference, flatten_config, full_configuration
from odc_mpi.observe.terminal import terminal_width
from odc_mpi.runtime.job_info import slurm_job
from odc_mpi.runtime.world import World
from odc_mpi.training.inputs import Inputs
from odc_mpi.training.recipes import recipe_of
from odc_mpi.training.rundir.records import has_records, next_earlier, open_run_directory, reopen_run_directory
from odc_mpi.training.rundir.run_dir_lock import RunDirectoryLock, convert_write_errors, require_shared
from odc_mpi.training.settings import Config, defaults, dump

#: Settings whose changes are not reported when a run resumes.
_UNREPORTED = {
    *("run.dir", "run.log_dir", "run.resume", "run.report_to", "run.checkpoint_every", "run.keep_checkpoints"),
    *("run.memory_every", "run.memory_dir", "comm.timeout_s"),
}
#: Settings that may differ when a complete run is started again: its length, its intervals, and those of the machine.
#: `data.path` may differ because the data are compared by their digest.
_WITHOUT_EFFECT = {
    *("run.steps", "run.num_train_epochs", "run.eval_every", "run.trace_steps", "rl.log_completions", "data.path"),
    *("run.device", "run.threads", "model.param_dtype", "model.gradient_checkpointing"),
    *(f"comm.{item.name}" for item in fields(CommConfig)),
}
#: Metadata entries that every checkpoint of a training run has.
_METADATA = {"config", "data_digest", "origin", "transformers_config", "architectures", "versions"}
_START_OVER_HINT = "to start over, set run.resume to never and choose another run.dir"


@dataclass
class ResumePoint:
    """Checkpoint from which a run starts.

    `continues_this_run` is True if the checkpoint is in `run.dir`, so the run that saved it continues. `path` is the
    last path to which this run's `run.resume` was set, as an absolute path, or None if it was never set to a path.
    """

    checkpoint: Checkpoint
    continues_this_run: bool
    path: str | None

    @property
    def step(self) -> int:
        """Number of steps completed before the checkpoint was saved."""
        return self.checkpoint.manifest.step

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata of the checkpoint."""
        return self.checkpoint.manifest.metadata

    def continues_island(self, part: Part) -> bool:
        """Return True if the checkpoint is of the island that trains on `part`, apart from the others."""
        islands = self.metadata.get("islands", {})
        return (islands.get("index"), islands.get("size")) == (part.index, part.count)

    def changed_settings(self, config: Config, ignored: Collection[str] = ()) -> list[str]:
        """Return "NAME BEFORE -> NOW" for each changed setting except `ignored` and minor ones, such as `run.dir`."""
        # An earlier version may lack a setting; it behaved as the current default does.
        before, now = defaults() | flatten_config(self.metadata["config"]), flatten_config(asdict(config))
        return [
            f"{key} {before.get(key)} -> {now.get(key)}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and key not in _UNREPORTED and key not in ignored
        ]


class DeferredErrorWeights(CheckpointWeights):
    """Reads the weights of a checkpoint, and stores the first error so that all ranks can raise it together later."""

    _error: UserError | None = None

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements `[start, stop)` of a flattened parameter, or store a `UserError` and return zeros."""
        try:
            return super().read(name, start, stop)
        except UserError as error:
            self._error = self._error or error
            return torch.zeros(stop - start)

    def raise_deferred_error(self) -> None:
        """Raise the first `UserError` that occurred in `read`, if any."""
        if self._error:
            raise self._error


def find_resume_point(config: Config, world: World, islands: Islands | None = None) -> ResumePoint | None:
    """Open the checkpoint from which the run starts, if any. Collective.

    `islands` are the islands of `world` that train apart, or None. Of a group of checkpoints of K islands, opens the
    one of this rank's island, of this island modulo K if there is none, or of the first.

    Raises `AllRanksUserError` if a rank does not see the run directory, if `run.resume` is a path without checkpoints,
    or if no existing checkpoint is complete.
    """
    require_shared(Path(config.run.dir), world)
    newest_in = partial(_newest, world, islands)
    requested, run_dir, job = config.run.resume, Path(config.run.dir), slurm_job()
    if requested == "never" and not job.get("slurm_restarts"):
        return None
    path = None if requested in ("never", "auto") else str(Path(requested).resolve())
    candidates = world.run_on_all(lambda: _list_checkpoints(run_dir, config.comm.timeout_s) if world.rank == 0 else [])
    newest = None
    try:
        newest = newest_in(candidates, _START_OVER_HINT if path is None else "")
    except AllRanksUserError as error:
        if path is None:
            raise
        if world.rank == 0:  # the requested checkpoint may be elsewhere
            warn(f"WARNING: no usable checkpoint in {run_dir} ({error}); starting from {requested}")
    if newest:
        metadata = newest.manifest.metadata
        if requested == "never":  # only if the scheduler restarted this job; checkpoints of other jobs are ignored
            continues = metadata.get("slurm_job_id") == job["slurm_job_id"]
        else:  # with a path, only if the scheduler restarted this run, which began there
            continues = path is None or metadata["origin"] == path
        if continues:
            return ResumePoint(newest, True, metadata["origin"])
        newest.close()
    if path is None:
        return None
    candidates = world.run_on_all(lambda: checkpoint_groups(Path(requested)))
    checkpoint = newest_in(candidates, _START_OVER_HINT)
    if checkpoint is None:
        raise AllRanksUserError(f"run.resume: expected checkpoints of the same merge on all islands, got {requested}")
    return ResumePoint(checkpoint, run_dir.resolve() in checkpoint.directory.resolve().parents, path)


def check_resume_point(resume_point: ResumePoint, config: Config, world: World, inputs: Inputs) -> None:
    """Check that the checkpoint matches `config` and `inputs`, and restore the model's buffers from it. Collective.

    Raises `AllRanksUserError` if it does not match.
    """
    world.run_on_all(lambda: _check_fits(resume_point, config, inputs))
    base = inputs.model.base
    if base is not None:
        recorded = resume_point.metadata["base"].get("quantization") or {}
        world.run_on_all(lambda: check_quantization(inputs.model.quantization, recorded))
        world.run_on_all(lambda: check_base(base, resume_point.metadata["base"], world.rank, world.size))
    world.run_on_all(lambda: restore_buffers(inputs.model.module, resume_point.checkpoint))


def resolve_steps(config: Config, inputs: Inputs, resume_point: ResumePoint | None = None) -> Config:
    """Return the configuration. If `run.steps` is 0, set it to the steps in `run.num_train_epochs` (default 1).

    With `resume_point`, moves the loader to its position, because the size of minibatches may have changed there.
    """
    if resume_point:
        inputs.loader.load_state_dict(resume_point.metadata["loader"])
    if config.run.steps:
        return config
    steps = inputs.loader.num_steps_to(config.run.num_train_epochs or 1.0) + (resume_point.step if resume_point else 0)
    return replace(config, run=replace(config.run, steps=steps, num_train_epochs=None))


def open_run(config: Config, resume_point: ResumePoint | None) -> RunDirectoryLock:
    """Lock and prepare the run directory. Return the lock. Call only on rank 0. For errors, see `RunDirectoryLock`."""
    terminal_width()  # validates ODC_MPI_PROGRESS
    run_dir = Path(config.run.dir)
    step = resume_point.step if resume_point else 0
    directory_lock = RunDirectoryLock(run_dir, config.comm.timeout_s, step)
    if resume_point and resume_point.continues_this_run:
        reopen_run_directory(run_dir, dump(config), resume_point.step)
    else:
        open_run_directory(run_dir, dump(config))
    return directory_lock


def start_line(config: Config, resume_point: ResumePoint | None) -> str:
    """Return the start-up line about the checkpoint and files that are moved to `earlier-N`, or "" if there is none."""
    run_dir = Path(config.run.dir)
    moved = "files of the earlier run" if has_records(run_dir) else ""
    if resume_point and resume_point.continues_this_run:
        newest = max(steps_in(run_dir / CHECKPOINTS), default=0)
        moved = "checkpoints of later steps" if newest > resume_point.step else ""
    tail = f"; the {moved} are moved to {next_earlier(run_dir)}" if moved else ""
    if resume_point:
        manifest, changed = resume_point.checkpoint.manifest, resume_point.changed_settings(config)
        ranks = "1 rank" if manifest.size == 1 else f"{manifest.size} ranks"
        islands = manifest.metadata.get("islands")
        of_islands = f" of each of {islands['size']} islands" if islands else ""
        settings = f"; changed settings: {', '.join(changed)}" if changed else ""
        saved = f"{resume_point.checkpoint.directory}, saved on {ranks}{of_islands}"
        return f"resuming from step {resume_point.step}: {saved}{settings}{tail}"
    if config.run.resume != "auto":
        return f"starting from scratch: run.resume {config.run.resume}{tail}" if moved else ""
    if moved or config.run.checkpoint_every:
        return f"starting from scratch: no checkpoint in {run_dir / CHECKPOINTS}{tail}"
    return ""


def report_already_complete(resume_point: ResumePoint, config: Config, world: World) -> dict[str, Any]:
    """Close the checkpoint of a complete run, print a notice on rank 0, and return a summary with only `steps`.

    Raises `AllRanksUserError` if the checkpoint is of another run, or if a setting that affects the run, such as the
    learning rate, has changed.
    """
    resume_point.checkpoint.close()
    if not resume_point.continues_this_run:
        raise AllRanksUserError(
            f"run.steps: expected more than the {resume_point.step} steps of {resume_point.checkpoint.directory}, got "
            f"{config.run.steps}: raise run.steps or run.num_train_epochs"
        )
    changed = resume_point.changed_settings(config, _WITHOUT_EFFECT)
    if not any(map(_islands_train_apart, (resume_point.metadata["config"], asdict(config)))):
        changed = [setting for setting in changed if not setting.startswith("islands.")]
    if changed:
        raise AllRanksUserError(
            f"run.dir: {config.run.dir} has a complete run with other settings ({', '.join(changed)}): choose another "
            "run.dir, set run.resume to never to start over, or raise run.steps to continue with these settings"
        )
    if world.rank == 0:
        print(
            f"already complete: {config.run.dir} is at step {resume_point.step} of {config.run.steps}. Raise run.steps "
            "to continue, or set run.resume to never to start over",
            flush=True,
        )
    return {"steps": resume_point.step}


def _islands_train_apart(config: Mapping[str, Any]) -> bool:
    islands = {"by": "off", **config.get("islands", {})}
    return islands["by"] != "off" and islands.get("mode", "hybrid") != "hybrid"


def _list_checkpoints(run_dir: Path, timeout_s: float) -> list[tuple[Path, ...]]:
    with convert_write_errors(run_dir):
        for each in (run_dir, *island_directories(run_dir)):
            if recoverable_checkpoints(each / CHECKPOINTS):
                # Locked, because another run may be about to publish a newer checkpoint under the same name.
                with RunDirectoryLock(each, timeout_s):
                    recover_retired(each / CHECKPOINTS)
        try:
            return checkpoint_groups(run_dir)
        except UserError:  # there are none
            return []


def _check_fits(resume_point: ResumePoint, config: Config, inputs: Inputs) -> None:
    checkpoint, metadata, saved = resume_point.checkpoint, resume_point.metadata, resume_point.metadata["config"]
    if (objective := saved["run"]["objective"]) != config.run.objective:
        raise UserError(
            f"run.objective: expected {objective}, that of the checkpoint {checkpoint.directory}, got "
            f"{config.run.objective}: set run.objective to {objective}; or to train its model with "
            f"{config.run.objective}, set model.path to it and run.resume to never, and choose another run.dir"
        )
    theirs, ours = (adapter or {} for adapter in (metadata.get("adapter"), inputs.model.adapter))
    if bool(theirs) != bool(ours):
        kind, got = ("adapters", "no lora.r") if theirs else ("a full model", "lora.r")
        raise UserError(
            f"the checkpoint {checkpoint.directory} is of {kind}, got {got}: set lora.* as in that run; or "
            f"{_START_OVER_HINT}"
        )
    for setting, expected, of_what, actual in (
        ("lora.r", theirs.get("r"), "as in", ours.get("r")),
        ("lora.alpha", theirs.get("lora_alpha"), "as in", ours.get("lora_alpha")),
        ("optim.optimizer", saved["optim"]["optimizer"], "as in", config.optim.optimizer),
        ("run.seed", saved["run"]["seed"], "as in", config.run.seed),
    ):
        if expected != actual:
            raise _mismatch(setting, expected, of_what, checkpoint, actual)
    require_model(checkpoint, inputs.model.module)
    # Models with the same shapes may differ in heads, positions, activations and the like.
    if difference := first_difference(metadata, full_configuration(inputs.model.module)):
        key, their_value, our_value = difference
        raise UserError(
            f"the checkpoint {checkpoint.directory} is of another model: {key} is {their_value!r} there, {our_value!r} "
            f"in this run: change model.path or model.config; or {_START_OVER_HINT}"
        )
    if metadata["data_digest"] != inputs.dataset.digest():
        path = saved["data"]["path"]
        raise UserError(
            f"data.path: expected the data of the checkpoint {checkpoint.directory} ({path}), got other data, "
            f"{config.data.path}: set data.path to the same data; or {_START_OVER_HINT}"
        )
    reference = saved["model"]["path"]
    has_moved = Path(reference or "").name != Path(config.model.path or "").name
    if has_moved and recipe_of(config).compares_with_base(config):
        raise _mismatch("model.path", reference, "the reference policy of", checkpoint, config.model.path)


def _mismatch(setting: str, expected: Any, of_what: str, checkpoint: Checkpoint, got: Any) -> UserError:
    return UserError(
        f"{setting}: expected {expected}, {of_what} the checkpoint {checkpoint.directory}, got {got}: change "
        f"{setting}; or {_START_OVER_HINT}"
    )


def _newest(
    world: World, islands: Islands | None, candidates: Sequence[tuple[Path, ...]], advice: str
) -> Checkpoint | None:
    """Open the newest group of complete checkpoints. Each rank checks some of the files. Collective.

    If none is complete, the message of the `AllRanksUserError` ends with `advice`.
    """
    # Use rank 0's candidates, because a file system may show a new checkpoint to some ranks later than to others.
    candidates = world.gather_objects(list(candidates))[0]
    problems: list[str] = []
    ranks = islands.island if islands else world  # which open the same checkpoint
    for group in reversed(candidates):
        path = _of_island(group, islands.index) if islands else group[0]
        checkpoint, problem = world.run_on_all(lambda path=path: _open_checkpoint(path, ranks))  # type: ignore[misc]
        rank_problems = world.gather_objects(problem)
        if not any(rank_problems):
            return checkpoint
        rank = next(rank for rank, problem in enumerate(rank_problems) if problem)
        problems.append(f"{rank_problems[rank]}{f' (on rank {rank})' if rank else ''}")
        if checkpoint:
            checkpoint.close()
        if world.rank == 0:
            following = ": trying the next older checkpoint" if group != candidates[0] else ""
            print(f"odc_mpi: WARNING: {problems[-1]}{following}", flush=True)
    if problems:
        raise AllRanksUserError(
            f"run.resume: expected a complete checkpoint, got none among {len(problems)}; the newest: {problems[0]}"
            f"{'; ' if advice else ''}{advice}"
        )
    return None


def _of_island(group: Sequence[Path], index: int) -> Path:
    """Return the checkpoint of an island, or that of another one if it is not in the group."""
    own = [path for path in group if path.parents[1].name == str(index)]
    return own[0] if own else group[index % len(group)]


def _open_checkpoint(path: Path, world: World) -> tuple[Checkpoint | None, str | None]:
    try:
        checkpoint = Checkpoint(path)
    except VersionError:
        raise
    except UserError as error:
        return None, str(error)
    if missing := _METADATA - checkpoint.manifest.metadata.keys():
        checkpoint.close()
        return None, f"{path} is not of a training run: its metadata lack {', '.join(sorted(missing))}"
    return checkpoint, checkpoint.check_files(range(world.rank, checkpoint.manifest.size, world.size))

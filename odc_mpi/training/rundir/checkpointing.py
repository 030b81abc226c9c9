"""When a run saves, and how the ranks agree on it: with the numbers that they tell at point A anyway.

before A   each rank tells which checkpoint its thread has written
after A    rank 0 publishes a checkpoint that all have written
after B    where a save is due, each rank copies its slices and hands them to its thread; if the one before is not
           known to be written yet, all wait for it and tell each other there, collectively
at the end collective: all wait for the last checkpoint, within comm.timeout_s
"""

import importlib.metadata
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from odc_mpi import __version__
from odc_mpi.checkpoint.manifest import CHECKPOINTS
from odc_mpi.checkpoint.saver import Saver
from odc_mpi.checkpoint.state import TrainingState
from odc_mpi.errors import StoppedError, TrainingError, warn
from odc_mpi.models.build import MetaModel
from odc_mpi.models.configuration import full_configuration
from odc_mpi.models.weights import part_digests
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.runtime.job_info import slurm_job
from odc_mpi.runtime.world import World
from odc_mpi.shard import model as sharded
from odc_mpi.training.exact.digest import parameters_digest
from odc_mpi.training.exact.numerics import check_numerics
from odc_mpi.training.inputs import Inputs
from odc_mpi.training.rundir.resume import ResumePoint
from odc_mpi.training.rundir.run_dir_lock import RunDirectoryLock
from odc_mpi.training.settings import Config
from odc_mpi.training.stop import StopRequest

_LIBRARIES = ("torch", "transformers", "numpy", "h5py", "mpi4py")


class CheckpointCallback(Callback):
    """The checkpoints of a run, and its end before the last step. Making one is collective. It comes after `stop`.

    Args:
        config: Of the run.
        world: The ranks.
        state_dict: Of the model and the optimizer.
        metadata: Returns what else belongs into a checkpoint; called on rank 0.
        stop: Whether a rank was asked to stop.
        directory_lock: On rank 0: without it nothing is saved any more.
        best: The best checkpoint of the run so far, as `state_dict` returned it.
    """

    gathered_names = ("saved_step", "saved_bytes", "saved_checksum")

    def __init__(
        self,
        config: Config,
        world: World,
        state: TrainingState,
        metadata: Callable[[], dict[str, Any]],
        stop: StopRequest,
        directory_lock: RunDirectoryLock | None,
        best: dict[str, Any] | None = None,
    ) -> None:
        self._run = config.run
        self._world = world
        self._state = state
        self._metadata = metadata
        self._stop = stop
        token = world.gather_objects(f"{time.time_ns():x}")[0]
        self._saver = Saver(
            Path(config.run.dir) / CHECKPOINTS,
            world.rank,
            world.size,
            token,
            keep=config.run.keep_checkpoints,
            warn=warn,
            check=directory_lock.require_held if directory_lock else lambda: None,
        )
        self._last: int | None = None
        self._best = best
        self._pause_s = self._wait_s = 0.0
        self._num_waits = 0

    def local_values(self) -> tuple[float, float, float]:
        """Return the last checkpoint that this rank has written, in numbers."""
        return self._saver.report()

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Take what all ranks have written."""
        self._saver.receive_reports(np.stack([gathered.per_rank(name) for name in self.gathered_names], axis=1))

    def on_step_end(self, step: Step) -> None:
        """Save, if that is due. Local, after point B, unless the last save is not complete: `_wait_for_pending`."""
        every, number = self._run.checkpoint_every, step.number
        if self._stop.requested_on_any_rank or (every and (number % every == 0 or number == self._run.steps)):
            self._update_best(step)
            self._save(number)

    def parameters_digest(self) -> str:
        """Return the digest that `odc-mpi checkpoint digest` would give of a checkpoint saved now. Collective."""
        return parameters_digest(self._state, self._world)

    def state_dict(self) -> dict[str, Any]:
        """Return the best checkpoint so far, its step and its loss."""
        return {"best": self._best}

    def on_train_end(self) -> dict[str, Any]:
        """Wait for the last checkpoint. Collective.

        Returns:
            What the summary tells of checkpoints.
        """
        self._wait_for_pending()
        saver = self._saver
        gathered = self._world.gather_objects(
            (saver.num_saved, saver.num_failed, saver.last_failed, self._num_waits, self._wait_s, self._pause_s)
        )
        saved, failed, self._last_failed, *_ = gathered[0]
        waits, wait_s, pause_s = (max(column) for column in list(zip(*gathered, strict=True))[3:])
        return {
            "checkpoints_saved": saved,
            "checkpoints_failed": failed,
            "checkpoint_waits": waits,
            "checkpoint_wait_s": wait_s,
            "checkpoint_pause_s": pause_s,
            "best_checkpoint": self._best["step"] if self._best else None,
        }

    def raise_if_incomplete(self, step: int) -> None:
        """Say how a run ended that did not go as it should. Local, after `on_train_end`; the same outcome on every rank.

        Raises:
            TrainingError: The last checkpoint could not be written.
            StoppedError: The run was asked to stop before its last step.
        """
        if self._last_failed:
            raise TrainingError(f"the last checkpoint, of step {self._last}, could not be written: see above")
        if self._stop.requested_on_any_rank and step < self._run.steps:
            raise StoppedError(f"stopped as asked after step {step}, which is saved: start again to go on")

    def _wait_for_pending(self) -> None:
        """See the last checkpoint complete, or given up. Collective if not all know that it is written, else local."""
        if self._saver.pending:
            with self._world.deadline(f"writing the checkpoint of step {self._last}"):
                self._saver.wait_until_written()
            self._saver.receive_reports(np.array(self._world.gather_objects(self._saver.report())))
        with self._world.deadline(f"publishing the checkpoint of step {self._last}"):
            self._saver.wait_until_published()

    def _update_best(self, step: Step) -> None:
        """Note a step whose evaluation was better than those of all checkpoints before."""
        loss = step.metrics.get("eval_loss")
        if loss is not None and math.isfinite(loss) and (self._best is None or loss < self._best["eval_loss"]):
            self._best = {"step": step.number, "eval_loss": loss}

    def _save(self, step: int) -> None:
        began = time.perf_counter()
        self._num_waits += self._saver.busy
        # Or a run of fast steps could be several checkpoints ahead of the newest that is complete.
        self._wait_for_pending()
        waited = time.perf_counter()
        entries = self._state.snapshot()
        manifest = self._state.describe(step, self._metadata()) if self._world.rank == 0 else None
        self._saver.start(step, entries, manifest, self._best["step"] if self._run.keep_best and self._best else None)
        self._last = step
        self._wait_s += waited - began
        self._pause_s += time.perf_counter() - waited


def run_metadata(config: Config, world: World, inputs: Inputs, resume_point: ResumePoint | None) -> dict[str, Any]:
    """Return the description of a run that a checkpoint holds besides the state, as JSON takes it. Collective.

    Raises:
        AgreedError: An exact run cannot go on here with the same arithmetic.
    """
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    module = inputs.model.module
    metadata: dict[str, Any] = {
        "config": asdict(config),
        "data_digest": inputs.dataset.digest(),
        "origin": resume_point.path if resume_point else None,
        "slurm_job_id": slurm_job().get("slurm_job_id"),
        "transformers_config": full_configuration(module),
        "architectures": [type(module).__name__],
        **_adapter_metadata(config, world, inputs.model, resume_point),
        "versions": {"odc_mpi": __version__, "python": platform.python_version(), **versions},
    }
    if config.run.exact:
        metadata["arithmetic"] = check_numerics(config.run.device, world, resume_point)
    return metadata


def _adapter_metadata(
    config: Config, world: World, model: MetaModel, resume_point: ResumePoint | None
) -> dict[str, Any]:
    """Return the description of adapters and their base; empty without adapters. Collective.

    Each rank reads its share of the base to make its digest. The base of a checkpoint is known to be this one.
    """
    base = model.base
    if base is None:
        return {}
    if resume_point:
        digests = resume_point.metadata["base"]["sha256"]
    else:
        shares = world.gather_objects(world.run_on_all(lambda: part_digests(base, world.rank, world.size)))
        digests = {part: share[part] for share in shares for part in share}
    reference = {"path": config.model.path, "config": config.model.config, "seed": config.run.seed}
    return {"adapter": model.adapter, "base": {**reference, "sha256": dict(sorted(digests.items()))}}

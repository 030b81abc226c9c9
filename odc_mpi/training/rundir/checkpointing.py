"""Checkpoints of a run: when they are saved, and how the ranks agree that a checkpoint is complete.

local_values   report which file a background thread of this rank has written, without a collective of its own
on_gathered    once all ranks have written their files, publish the checkpoint on rank 0
on_step_end    if a checkpoint is due, wait for the previous one, copy this rank's shards, and start a thread that
               writes them (collective)
on_train_end   wait until the last checkpoint is written and published, for at most `comm.timeout_s` each (collective)
"""

import importlib.metadata
import math
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odc_mpi import __version__
from odc_mpi.checkpoint.manifest import CHECKPOINTS, TensorRecord, blocks, compute_digest
from odc_mpi.checkpoint.saver import Saver
from odc_mpi.checkpoint.shard_file import stored_type
from odc_mpi.checkpoint.state import TensorRange, TrainingState, stored_array
from odc_mpi.errors import StoppedError, TrainingError, warn
from odc_mpi.models.adapters.check import part_digests
from odc_mpi.models.build import MetaModel
from odc_mpi.models.configuration import full_configuration
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.metrics import DETAILS, MACHINE, RESULT, SPEED, Metric
from odc_mpi.runtime.job_info import slurm_job
from odc_mpi.runtime.world import World
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.training.context import RunContext
from odc_mpi.training.exact import check_numerics
from odc_mpi.training.inputs import Inputs
from odc_mpi.training.loop import Trainer
from odc_mpi.training.recipes import recipe_of
from odc_mpi.training.rundir.memory_tier import MemoryTier, remove_leftovers
from odc_mpi.training.rundir.resume import ResumePoint
from odc_mpi.training.rundir.run_dir_lock import RunDirectoryLock
from odc_mpi.training.settings import Config

_LIBRARIES = ("torch", "transformers", "numpy", "h5py", "mpi4py")


class CheckpointCallback(Callback):
    """Saves checkpoints when they are due and before the run stops on request. Construction is collective.

    `stop` must precede this callback in `trainer.callbacks`. `directory_lock` is None except on rank 0. If another run
    takes over the lock, saving stops. `metadata` comes from `run_metadata`.
    """

    gathered_names = ("saved_step", "saved_bytes", "saved_checksum", "memory_step")
    metrics = (
        Metric("best_checkpoint", "step of the best checkpoint", RESULT, "end"),
        Metric("checkpoint_pause_s", "copying for checkpoints", SPEED, "end"),
        Metric("checkpoint_wait_s", "waiting for checkpoints", SPEED, "end"),
        Metric("checkpoints_saved", "checkpoints saved", MACHINE, "end"),
        Metric("checkpoints_failed", "checkpoints failed", MACHINE, "end"),
        Metric("memory_copies", "states copied to memory", MACHINE, "end"),
        Metric("checkpoint_waits", "checkpoints for which the training waited", DETAILS, "end"),
        Metric("parameters_digest", "parameters digest", summary="end"),
        Metric("arithmetic", "arithmetic", summary="end"),
    )

    def __init__(
        self, context: RunContext, trainer: Trainer, metadata: dict[str, Any], directory_lock: RunDirectoryLock | None
    ) -> None:
        config, world, resume_point = context.config, context.world, context.resume_point
        self._run, self._world, self._stop = config.run, world, context.stop
        self._trainer, self._metadata = trainer, metadata
        optimizer, has_base = trainer.update.optimizer, "base" in metadata
        make_state = partial(
            TrainingState, trainer.model, optimizer, world.rank, omit_frozen_base=has_base, tensors=trainer.tensors
        )
        self._state = make_state()
        self._is_due = False
        #: Metric that chooses the best checkpoint, and its better direction.
        self._best_by = recipe_of(config).best
        # Step and metric of the best checkpoint so far.
        continued = resume_point.metadata if resume_point and resume_point.continues_this_run else {}
        self._best: dict[str, Any] | None = continued.get("best")
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
        remove_leftovers(config.run, world)
        self._memory = MemoryTier(context, make_state(), token) if config.run.memory_every else None
        #: Last step for which saving was started. Initially, the number of steps that were already complete.
        self._last = trainer.completed_steps
        self._pause_s = self._wait_s = 0.0
        self._num_waits = 0

    def local_values(self) -> tuple[float, ...]:
        """Return the files that this rank has written: the numbers of `Saver.report` and of `MemorySaver.report`."""
        return (*self._saver.report(), self._memory.saver.report() if self._memory else 0.0)

    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        """Pass the reports of all ranks to the saver, which publishes the checkpoint once all files are written."""
        *reports, in_memory = (gathered.per_rank(name) for name in self.gathered_names)
        self._saver.receive_reports(np.stack(reports, axis=1))
        if self._memory:
            self._memory.saver.receive_reports(in_memory)

    def on_step_end(self, step: Step) -> None:
        """Start saving a checkpoint if one is due or a stop was requested. Collective in this case."""
        every, number = self._run.checkpoint_every, step.number
        self._is_due |= number == self._run.steps or bool(every and number % every == 0)
        self._is_due |= any(callback.requests_saving for callback in self._trainer.callbacks)
        if (self._is_due or self._stop.requested_on_any_rank) and self._saving_is_allowed:
            self._is_due = False
            self._update_best(step)
            self._save(number)
        if self._memory and number < self._run.steps and not self._stop.requested_on_any_rank:
            self._memory.save_if_due(number, self._all_metadata)

    def save_last_step(self, step: int) -> None:
        """Start saving a checkpoint of `step`, the last complete step, if allowed and not begun. Collective."""
        if step != self._last and self._saving_is_allowed:
            self._save(step)

    def parameters_digest(self) -> str:
        """Return the digest that `odc-mpi checkpoint digest` would print for the current state. Collective."""
        return state_digest(self._world, self._state)

    def state_dict(self) -> dict[str, Any]:
        """Return `best`: the step and the metric (`Recipe.best`) of the best checkpoint so far, or None."""
        return {"best": self._best}

    def on_train_end(self) -> dict[str, Any]:
        """Wait for the last checkpoint, and return summary entries. Call this before `raise_outcome`. Collective."""
        self._wait_for_pending()
        saver, memory = self._saver, self._memory
        wait_s, pause_s = self._wait_s, self._pause_s
        if memory:
            wait_s, pause_s = wait_s + memory.wait_s, pause_s + memory.pause_s
        gathered = self._world.gather_objects(
            (saver.num_saved, saver.num_failed, saver.last_failed, self._num_waits, wait_s, pause_s)
        )
        saved, failed, self._last_failed, *_ = gathered[0]
        if memory:
            memory.close(remove_copies=self._last == self._trainer.completed_steps and not self._last_failed)
        waits, wait_s, pause_s = (max(column) for column in list(zip(*gathered, strict=True))[3:])
        return {
            "checkpoints_saved": saved,
            "checkpoints_failed": failed,
            "memory_copies": memory.saver.num_saved if memory else 0,
            "checkpoint_waits": waits,
            "checkpoint_wait_s": wait_s,
            "checkpoint_pause_s": pause_s,
            "best_checkpoint": self._best["step"] if self._best else None,
        }

    def raise_outcome(self, step: int) -> None:
        """Raise `TrainingError` if the last save failed, or `StoppedError` if the run stopped early, after `step`."""
        if self._last_failed:
            raise TrainingError(f"the last checkpoint, of step {self._last}, could not be written: see above")
        if self._stop.requested_on_any_rank and step < self._run.steps:
            raise StoppedError(
                f"stopped on request after step {step}; checkpoint saved. Run the same command to resume"
            )

    @property
    def _saving_is_allowed(self) -> bool:
        return all(callback.allows_saving for callback in self._trainer.callbacks)

    def _wait_for_pending(self) -> None:
        """Wait until the last checkpoint is published or has failed. Collective if ranks may still be writing it."""
        if self._saver.pending:
            with (
                self._trainer.model.spans.span("save"),
                self._world.deadline(f"writing the checkpoint of step {self._last}"),
            ):
                self._saver.wait_until_written()
            self._saver.receive_reports(np.array(self._world.gather_objects(self._saver.report())))
        with self._world.deadline(f"publishing the checkpoint of step {self._last}"):
            self._saver.wait_until_published()

    def _update_best(self, step: Step) -> None:
        name, better = self._best_by
        value, best = step.metrics.get(name), (self._best or {}).get(name)
        if value is None or not math.isfinite(value):
            return
        if best is None or (value < best if better == "low" else value > best):
            self._best = {"step": step.number, name: value}

    def _all_metadata(self) -> dict[str, Any]:
        # The cost is None unless `FitCostModel` is a callback.
        return {**self._metadata, "cost": None, **self._trainer.state_dict()}

    def _save(self, step: int) -> None:
        began = time.perf_counter()
        self._num_waits += self._saver.busy
        # Otherwise a run with fast steps could be several checkpoints ahead of the newest complete one.
        self._wait_for_pending()
        waited = time.perf_counter()
        records = self._world.gather_objects(self._state.state_records())
        entries = self._state.snapshot()
        manifest = None
        if self._world.rank == 0:
            manifest = self._state.make_manifest(step, self._all_metadata(), records)
        self._saver.start(step, entries, manifest, self._best["step"] if self._run.keep_best and self._best else None)
        self._last = step
        self._trainer.model.spans.add("save", waited)
        self._wait_s += waited - began
        self._pause_s += time.perf_counter() - waited


def run_metadata(config: Config, world: World, inputs: Inputs, resume_point: ResumePoint | None) -> dict[str, Any]:
    """Return the JSON-serializable metadata to store in every checkpoint of the run. Collective."""
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    module = inputs.model.module
    metadata: dict[str, Any] = {
        "config": asdict(config),
        "data_digest": inputs.dataset.digest(),
        "prompt_time": inputs.prompt_time,
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
    """Return the metadata of the adapters with digests of their base, or {} without adapters. Collective."""
    base = model.base
    if base is None:
        return {}
    if model.checkpoint:  # the adapters of another run, over the same base
        return {"adapter": model.adapter, "base": model.checkpoint.manifest.metadata["base"]}
    if resume_point:
        digests = resume_point.metadata["base"]["sha256"]
    else:
        shares = world.gather_objects(world.run_on_all(lambda: part_digests(base, world.rank, world.size)))
        digests = {part: share[part] for share in shares for part in share}
    path = config.model.path
    if path and Path(path).exists():  # not a name on the Hub
        path = str(Path(path).absolute())  # commands on the checkpoint may run in another directory
    reference = {
        "path": path,
        "config": config.model.config,
        "seed": config.run.seed,
        "quantization": model.quantization,
    }
    return {"adapter": model.adapter, "base": {**reference, "sha256": dict(sorted(digests.items()))}}


def state_digest(world: World, state: TrainingState) -> str:
    """Return the digest that `odc-mpi checkpoint digest` would print for a checkpoint of `state`. Collective."""
    # All ranks visit the tensors in the same order; rank 0 alone has all blocks, so its digest is the right one.
    manifest = state.make_manifest(0, {}, world.gather_objects(state.state_records()))
    parts = {tensor_range.path: tensor_range for tensor_range in state.tensor_ranges()}
    digest = compute_digest(manifest, partial(_send_blocks, world, parts))
    return world.gather_objects(digest)[0]


def _send_blocks(
    world: World, parts: Mapping[str, TensorRange], name: str, record: TensorRecord
) -> Iterator[npt.NDArray]:
    """Yield all blocks of a tensor on rank 0. The other ranks yield their own blocks and send them to rank 0."""
    description = "sending parameters to rank 0 for their digest"
    for rank, first, last in record.ranges:
        for start, stop in blocks(first, last):
            if rank == world.rank:
                local = parts[name].tensor.detach()[start - first : stop - first]
                block = stored_array(local.cpu().contiguous())
                if rank:
                    world.wait(world.comm.Isend(block.view(np.uint8), dest=0), description)
                yield block
            elif not world.rank:
                block = np.empty(stop - start, dtype=stored_type(record.dtype))
                world.wait(world.comm.Irecv(block.view(np.uint8), source=rank), description)
                yield block

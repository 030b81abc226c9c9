"""Copies of the state in the memory of the nodes (`run.memory_every`), for `odc-mpi checkpoint rescue`.

require_memory_room  check the room in `run.memory_dir`, before anything is written (collective)
remove_leftovers     delete what an earlier start of the run has left there (collective)
MemoryTier           makes the copies; `CheckpointCallback` calls it at its own hooks
"""

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from odc_mpi.checkpoint.memory import MemorySaver, expand, make_rank_directory, remove, require_room
from odc_mpi.checkpoint.state import TrainingState
from odc_mpi.comm.buddies import Buddies
from odc_mpi.errors import warn
from odc_mpi.runtime.job_info import slurm_job
from odc_mpi.runtime.library import has_thread_multiple
from odc_mpi.runtime.world import World
from odc_mpi.training.context import RunContext
from odc_mpi.training.settings import RunConfig
from odc_mpi.training.start.memory_estimate import memory_tier_bytes


def require_memory_room(context: RunContext) -> None:
    """Raise `AllRanksUserError` if `run.memory_dir` of a node lacks room for the copies of its ranks. Collective."""
    config, world = context.config, context.world
    if config.run.memory_every is None:
        return
    ranks_per_node = max(count for _, count in world.layout)
    num_bytes = world.local_size * memory_tier_bytes(config, context.inputs.model, world.size, ranks_per_node)
    world.run_on_all(
        lambda: require_room(expand(config.run.memory_dir), Path(config.run.dir), num_bytes, min(world.num_nodes, 2))
    )


def remove_leftovers(run: RunConfig, world: World) -> None:
    """Delete what an earlier start of the run has left in the memory of the nodes. The run is locked. Collective."""
    world.run_on_all(lambda: remove(expand(run.memory_dir), Path(run.dir)) if world.local_rank == 0 else None)


class MemoryTier:
    """Saves `state` to memory every `run.memory_every` steps. Construction is collective, after `remove_leftovers`.

    `token` identifies this start of the run. Each rank has two generations, and copies of those of a rank of another
    node. No rank waits for them unless the next copy is due.

    Attributes:
        saver: Saver of the copies, whose reports the ranks gather when the gradients are complete.
        wait_s, pause_s: Seconds for which this rank has waited for an earlier copy, and for which it has copied.
    """

    def __init__(self, context: RunContext, state: TrainingState, token: str) -> None:
        world, run = context.world, context.config.run
        assert run.memory_every is not None
        self._world, self._every, self._state = world, run.memory_every, state
        self._manifest: dict[str, Any] = {}
        self.wait_s = self.pause_s = 0.0
        job, memory_dir = slurm_job().get("slurm_job_id", "0"), expand(run.memory_dir)
        self._directory = world.run_on_all(lambda: make_rank_directory(memory_dir, Path(run.dir), job, world.rank))
        buddies = Buddies(world) if world.num_nodes > 1 and has_thread_multiple() else None
        if world.num_nodes > 1 and buddies is None and world.rank == 0:
            warn("WARNING: run.memory_every: no copies on other nodes: MPI grants less than MPI_THREAD_MULTIPLE")
        self.saver = MemorySaver(self._directory, world.rank, world.size, token, buddies, warn)

    def save_if_due(self, step: int, metadata: Callable[[], dict[str, Any]]) -> None:
        """Start to copy the state after `step`, if it is due. `metadata` returns that of checkpoints.

        Collective if the previous copy is not yet complete: so at most two intervals are lost.
        """
        if step % self._every:
            return
        began = time.perf_counter()
        if self.saver.pending:
            with self._world.deadline("copying the state to memory"):
                self.saver.wait_until_written()
            self.saver.receive_reports(np.array(self._world.gather_objects(self.saver.report())))
        waited = time.perf_counter()
        manifest = None
        if self._world.rank == 0:
            # Made once: for 420 adapters, it takes 30 ms.
            if not self._manifest:
                self._manifest = asdict(self._state.make_manifest(step, {}, [{} for _ in range(self._world.size)]))
            manifest = self._manifest | {"step": step, "metadata": metadata()}
        self.saver.start(step, self._state.snapshot(), self._state.state_records(), manifest)
        self.wait_s += waited - began
        self.pause_s += time.perf_counter() - waited

    def close(self, *, remove_copies: bool) -> None:
        """Wait for the last copy, and delete this rank's copies unless they have to be rescued."""
        with self._world.deadline("copying the state to memory"):
            self.saver.wait_until_written()
        if remove_copies:
            shutil.rmtree(self._directory, ignore_errors=True)
            with suppress(OSError):  # not empty: other ranks have not finished
                self._directory.parent.rmdir()

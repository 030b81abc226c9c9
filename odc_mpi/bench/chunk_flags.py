"""Flags that synchronize the chunks of split sequences, without keys and values: for the benchmark of schedules.

    forward     a chunk sets its flag before a unit, and waits until all earlier chunks have reached that unit
    backward    a chunk sets its flag after a unit, and waits until all later chunks are done with that unit

Each rank writes its own flag, and the others poll it one-sided. A flag never decreases, also across minibatches, so it
needs no reset, and a delayed read only waits longer.
"""

import time

import torch

from odc_mpi.comm.windows.rma import Window
from odc_mpi.data.plan.chunks import SequenceSplit
from odc_mpi.runtime.world import World

#: Seconds between two polls of a flag: short compared with the sleep of a unit, long enough to leave cores to others.
POLL_S = 5e-4


class ChunkFlags:
    """One flag per rank. Construction is collective.

    Args:
        world: Ranks that share sequences. Closing it frees the flags.
        num_units: Units of the model.
    """

    def __init__(self, world: World, num_units: int) -> None:
        self._world, self._num_steps = world, 2 * num_units
        self._window = Window(world, 1, torch.int64)
        self._num_splits_before = 0
        world.on_close(self.close)
        world.wait_collective(world.comm.Ibarrier(), "setting chunk flags to zero")

    def synchronize(self, position: int, split: SequenceSplit, index: int, step: int) -> None:
        """Publish a step of this rank's chunk; wait for earlier chunks in forward, for later ones in backward.

        One-sided.

        Args:
            position: Index of the sequence among the minibatch's split sequences.
            split: Split sequence.
            index: Index of this rank's chunk.
            step: Units reached in forward plus units completed in backward, from 0.
        """
        reached = (self._num_splits_before + position) * self._num_steps + step + 1
        with self._world.deadline("setting a chunk flag", [self._world.rank]):
            self._window.atomic_store(self._world.rank, 0, reached)
        others = range(index) if step < self._num_steps // 2 else range(index + 1, len(split.ranks))
        for other in others:
            rank = split.ranks[other]
            with self._world.deadline(f"waiting for chunk {other} of a sequence at step {step}", [rank]):
                while self._window.atomic_read(rank, 0) < reached:
                    time.sleep(POLL_S)

    def next_minibatch(self, num_splits: int) -> None:
        """Continue with the next minibatch, on every rank, after one with `num_splits` split sequences."""
        self._num_splits_before += num_splits

    def close(self) -> None:
        """Free the flags. Collective. Idempotent."""
        if self._num_steps:
            self._num_steps = 0
            with self._world.collective("freeing chunk flags"):
                self._window.free()
            self._world.cancel_on_close(self.close)

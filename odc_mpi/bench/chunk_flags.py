"""Flags that synchronize the chunks of split sequences in the benchmark of schedules, without moving keys and values.

    forward     a chunk sets its flag before a unit, and waits until all earlier chunks have reached that unit
    backward    a chunk sets its flag after a unit, and waits until all later chunks are done with that unit

Each rank writes its own flag, and the other ranks poll it with one-sided reads. A flag never decreases, even between
minibatches. So it needs no reset, and a rank that reads an old value only waits longer.
"""

import time

import torch

from odc_mpi.comm.windows.rma import Window
from odc_mpi.data.plan.chunks import SequenceSplit
from odc_mpi.runtime.world import World

#: Seconds between two polls of a flag: short compared with the sleep of a unit, long enough to leave cores to others.
POLL_S = 5e-4


class ChunkFlags:
    """One flag per rank that counts the steps of its chunks. Closing the world frees it. Construction is collective."""

    def __init__(self, world: World, num_units: int) -> None:
        self._world, self._num_steps = world, 2 * num_units
        self._window = Window(world, 1, torch.int64)
        self._num_splits_before = 0
        world.on_close(self.close)
        world.wait_collective(world.comm.Ibarrier(), "setting chunk flags to zero")

    def synchronize(self, position: int, split: SequenceSplit, index: int, step: int) -> None:
        """Publish that this rank's chunk has reached a step, and wait until other chunks have reached it. One-sided.

        In the forward the chunk waits for all earlier chunks of the sequence, in the backward for all later ones.

        Args:
            position: Index of the sequence among the split sequences of the minibatch.
            index: Index of this rank's chunk in the sequence.
            step: Index of the step, from 0. Each unit is a step of the forward, and another one of the backward.
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
        """Prepare for the next minibatch, after one with `num_splits` split sequences. Call it on every rank."""
        self._num_splits_before += num_splits

    def close(self) -> None:
        """Free the flags. Collective. Idempotent."""
        if self._num_steps:
            self._num_steps = 0
            with self._world.collective("freeing chunk flags"):
                self._window.free()
            self._world.cancel_on_close(self.close)

"""How far the ranks that share a sequence have come: flags that each sets for itself and others look at, one-sided.

    forward     a piece shows a unit when it comes to it, and waits until all pieces before it have shown theirs
    backward    a piece shows that it is done with a unit, and leaves the unit when all pieces after it have shown that

A flag only grows, from minibatch to minibatch, so nothing is ever reset and a late look is never wrong.
"""

import time

import torch

from odc_mpi.comm.windows.rma import Window
from odc_mpi.data.plan.chunks import SequenceSplit
from odc_mpi.runtime.world import World

#: Seconds between two looks at a flag: short beside the sleep of a unit, long enough to leave cores to others.
POLL_S = 5e-4


class ChunkFlags:
    """A flag on each rank. Making one is collective.

    Args:
        world: The ranks; the flags are freed with it.
        num_units: Units of the model.
    """

    def __init__(self, world: World, num_units: int) -> None:
        self._world, self._num_steps = world, 2 * num_units
        self._window = Window(world, 1, torch.int64)
        self._num_before = 0
        world.on_close(self.close)
        world.wait_collective(world.comm.Ibarrier(), "setting flags of pieces to zero")

    def synchronize(self, position: int, split: SequenceSplit, index: int, step: int) -> None:
        """Show a step of this rank's piece; wait for those before it in forward, for those behind it in backward.

        One-sided.

        Args:
            position: Of the sequence among the minibatch's.
            split: The sequence.
            index: Of this rank's piece.
            step: Units come to in forward and done with in backward, from 0 on.
        """
        reached = (self._num_before + position) * self._num_steps + step + 1
        with self._world.deadline("showing how far a piece is", [self._world.rank]):
            self._window.atomic_store(self._world.rank, 0, reached)
        others = range(index) if step < self._num_steps // 2 else range(index + 1, len(split.ranks))
        for other in others:
            rank = split.ranks[other]
            with self._world.deadline(f"waiting for piece {other} of a sequence at step {step}", [rank]):
                while self._window.atomic_read(rank, 0) < reached:
                    time.sleep(POLL_S)

    def next_minibatch(self, num_splits: int) -> None:
        """Go on to the next minibatch, after one with so many sequences that were cut. Local, on every rank."""
        self._num_before += num_splits

    def close(self) -> None:
        """Free the flags. Collective; a second call does nothing."""
        if self._num_steps:
            self._num_steps = 0
            with self._world.collective("freeing the flags of pieces"):
                self._window.free()
            self._world.cancel_on_close(self.close)

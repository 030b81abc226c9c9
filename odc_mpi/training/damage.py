"""Handling of damaged sequences found during training: all ranks save the last complete step and end the run.

A rank that cannot read a sequence must not stop at once, because other ranks may be waiting for its microbatches, or
for the keys and values of a chunk. Instead, it continues with placeholder tokens. When the ranks gather their values at
the end of the minibatch, all of them learn of the damage, discard the gradients and raise the same error.
"""

from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt

from odc_mpi.data.dataset.format import DamagedDatasetError
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.loader import Minibatch
from odc_mpi.errors import AllRanksUserError
from odc_mpi.runtime.world import World


class DamageFoundError(AllRanksUserError):
    """Raised by every rank if any rank could not read a sequence. The message comes from the lowest such rank."""


class PlaceholderDataset:
    """View of a data set that returns placeholders for sequences that cannot be read.

    A placeholder has the length and the number of loss tokens of its sequence, but all its tokens are 0. `damage` is
    the first read error on this rank, or None. The caller must call `raise_damage` before using any results.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self.pair_counts = dataset, dataset.pair_counts
        self.lengths, self.num_trained_tokens = dataset.lengths, dataset.num_trained_tokens
        self.damage: DamagedDatasetError | None = None

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Read a sequence as `Dataset` does, or return a placeholder and set `damage`."""
        try:
            return self._dataset[index]
        except DamagedDatasetError as error:
            self.damage = self.damage or error
            length = int(self.lengths[index])
            return np.zeros(length, dtype=np.int64), np.arange(length) >= length - self.num_trained_tokens[index]

    def apply(self, minibatch: Minibatch) -> Minibatch:
        """Return a minibatch whose sequences are read through this view."""
        return replace(minibatch, dataset=cast(Dataset, self))

    def raise_damage(self, world: World) -> None:
        """Raise `DamageFoundError` on all ranks if `damage` is set on any rank. Collective."""
        for rank, message in enumerate(world.gather_objects(self.damage and str(self.damage))):
            if message is not None:
                raise DamageFoundError(f"rank {rank}: {message}")

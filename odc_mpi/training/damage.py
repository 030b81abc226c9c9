"""Damage in a data set that is found during training: the run ends on all ranks, with its last good step saved.

A rank that cannot read a sequence must not stop at once, since others may wait for its microbatches, or for the keys
and values of a chunk. Instead it continues with placeholder tokens. When the ranks gather their numbers, all of them
learn of the damage, discard what was computed, and raise the same error.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from odc_mpi.data.dataset.format import DamagedDatasetError
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.errors import AllRanksUserError
from odc_mpi.runtime.world import World


class DamageFoundError(AllRanksUserError):
    """Damage in a data set that any rank has found during training. Raised by every rank."""


class PlaceholderDataset(Dataset):
    """Data set that yields placeholders for sequences that cannot be read.

    A placeholder has the length and the number of loss tokens of the sequence, and only the token 0. The caller must
    discard all results if `damage` is set on any rank.

    Attributes:
        damage: First error on this rank; None if all sequences so far were intact.
    """

    def __init__(self, path: Path | str) -> None:
        self.damage: DamagedDatasetError | None = None
        super().__init__(path)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Read a sequence, or return a placeholder and set `damage`."""
        try:
            return super().__getitem__(index)
        except DamagedDatasetError as error:
            self.damage = self.damage or error
            length = int(self.lengths[index])
            return np.zeros(length, dtype=np.int64), np.arange(length) >= length - self.num_trained_tokens[index]


def raise_damage(world: World, dataset: Dataset) -> None:
    """Raise `DamageFoundError` on all ranks if `dataset.damage` is set on any rank. Collective."""
    damage = dataset.damage if isinstance(dataset, PlaceholderDataset) else None
    for rank, message in enumerate(world.gather_objects(damage and str(damage))):
        if message is not None:
            raise DamageFoundError(f"rank {rank}: {message}")

"""A checkpoint, open for reading: slices of its tensors, wherever they lie in its files.

All reading goes through the manifest and the checksums; index.h5 is for people and their tools alone.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from odc_mpi.checkpoint.manifest import (
    CHECKPOINTS,
    INDEX,
    MANIFEST,
    Manifest,
    TensorRecord,
    read_manifest,
    shard_name,
    steps_in,
)
from odc_mpi.checkpoint.shard_file import ShardFile, checksum_of_file, stored_type
from odc_mpi.errors import UserError

#: The most files held open: one rank may have to read the files of a thousand ranks.
_MAX_OPEN = 64


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """A complete checkpoint. A context manager; closes twice without harm.

    Raises:
        UserError: The checkpoint is incomplete, damaged or of another version, by its manifest.

    Attributes:
        directory: Directory of the checkpoint.
        manifest: Content of the checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: Manifest = read_manifest(directory)
        self._files: dict[int, ShardFile] = {}

    @property
    def step(self) -> int:
        """Steps that were done."""
        return self.manifest.step

    def read(self, path: str, start: int = 0, stop: int | None = None) -> npt.NDArray:
        """Read elements `[start, stop)` of a flattened tensor, in its stored type.

        Raises:
            UserError: There is no such tensor, or its file is damaged.
        """
        record = self.record(path)
        stop = record.numel if stop is None else stop
        dtype = stored_type(record.dtype)
        parts = [
            self._file(rank).read(path, max(start, first), min(stop, last)).astype(dtype, copy=False)
            for rank, first, last in record.ranges
            if max(start, first) < min(stop, last)
        ]
        found = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])
        if found.size != max(0, stop - start):
            raise UserError(f"{self.directory} is damaged: it holds {found.size} of {stop - start} elements of {path}")
        return found

    def record(self, path: str) -> TensorRecord:
        """Return the manifest's record of a tensor."""
        if path not in self.manifest.tensors:
            raise UserError(f"{self.directory} has no tensor {path}")
        return self.manifest.tensors[path]

    def check_files(self, ranks: Iterable[int]) -> str | None:
        """Check that these ranks' files are there, intact, and of this checkpoint; tensors are not read.

        Returns:
            The problem of the first bad file in words; None if there is none.
        """
        try:
            for rank in ranks:
                with self._open(rank):
                    pass
        except UserError as error:
            return str(error)
        return None

    def verify(self) -> Iterator[str]:
        """Read every byte, and yield a sentence for each damage."""
        for rank in range(self.manifest.size):
            try:
                with self._open(rank) as file:
                    yield from file.verify()
            except UserError as error:
                yield str(error)
        path = self.directory / INDEX
        try:
            if checksum_of_file(path) != self.manifest.files[INDEX]:
                yield f"{path} is damaged: its checksum does not fit"
        except FileNotFoundError:
            yield f"{path} is missing"
        except OSError as error:
            yield f"cannot read {path}: {error.strerror}"

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.popitem()[1].close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, rank: int) -> ShardFile:
        name = shard_name(self.step, rank)
        return ShardFile(self.directory / name, self.manifest.files[name])

    def _file(self, rank: int) -> ShardFile:
        if rank not in self._files:
            if len(self._files) >= _MAX_OPEN:
                self.close()
            self._files[rank] = self._open(rank)
        return self._files[rank]


def checkpoint_directories(path: Path) -> list[Path]:
    """Return the directories of checkpoints below a path, the oldest first, complete or not.

    Args:
        path: A run directory, its directory of checkpoints, or one checkpoint.

    Raises:
        UserError: There are no checkpoints.
    """
    if (path / MANIFEST).exists() or path in steps_in(path.parent).values():
        return [path]
    for folder in (path / CHECKPOINTS, path):
        found = list(steps_in(folder).values())
        if found:
            return found
    raise UserError(f"expected a run directory, its checkpoints or one of them, got {path}, where there are none")

"""Reading slices of tensors from a checkpoint. Checksums are verified on reading; index.h5 is not used."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from odc_mpi.checkpoint.manifest import INDEX, Manifest, TensorRecord, read_manifest, shard_name
from odc_mpi.checkpoint.shard_file import ShardFile, checksum_of_file, stored_type
from odc_mpi.errors import UserError

#: Maximum number of open files, because one rank may have to read the files of a thousand ranks.
_MAX_OPEN = 64


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """Complete checkpoint that is open for reading. The constructor raises the same errors as `read_manifest`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: Manifest = read_manifest(directory)
        self._files: dict[int, ShardFile] = {}

    def read(self, path: str, start: int, stop: int) -> npt.NDArray:
        """Read elements `[start, stop)` of the flattened tensor `path` as a 1D array of the stored type.

        Raises `UserError` if there is no such tensor, or if the data is damaged.
        """
        record = self.record(path)
        dtype = stored_type(record.dtype)
        parts = [
            self._file(rank).read(path, max(start, first), min(stop, last))
            for rank, first, last in record.ranges
            if max(start, first) < min(stop, last)
        ]
        values = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])
        if mismatched := [part.dtype for part in parts if part.dtype != dtype]:
            raise UserError(f"{self.directory} is damaged: expected {dtype} in {path}, got {mismatched[0]}")
        if values.size != max(0, stop - start):
            raise UserError(f"{self.directory} is damaged: it has {values.size} of {stop - start} elements of {path}")
        return values

    def record(self, path: str) -> TensorRecord:
        """Return the record of the tensor `path`. Raise `UserError` if there is no such tensor."""
        if path not in self.manifest.tensors:
            raise UserError(f"{self.directory} has no tensor {path}")
        return self.manifest.tensors[path]

    def check_files(self, ranks: Iterable[int]) -> str | None:
        """Verify the files of `ranks`, except tensor data. Return the first error message, or None if there is none."""
        try:
            for rank in ranks:
                with self._open(rank):
                    pass
        except UserError as error:
            return str(error)
        return None

    def verify(self) -> Iterator[str]:
        """Read every byte of all files except the manifest, and yield a message for each error."""
        for rank in range(self.manifest.size):
            try:
                with self._open(rank) as file:
                    yield from file.verify()
            except UserError as error:
                yield str(error)
        if INDEX not in self.manifest.files:
            return
        path = self.directory / INDEX
        try:
            if checksum_of_file(path) != self.manifest.files[INDEX]:
                yield f"{path} is damaged: its checksum does not match"
        except OSError as error:
            yield f"cannot read {path}: {error.strerror}"

    def close(self) -> None:
        """Close all open files. Idempotent."""
        while self._files:
            self._files.popitem()[1].close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, rank: int) -> ShardFile:
        name = shard_name(self.manifest.step, rank)
        return ShardFile(self.directory / name, self.manifest.files[name])

    def _file(self, rank: int) -> ShardFile:
        if rank not in self._files:
            if len(self._files) >= _MAX_OPEN:
                self.close()
            self._files[rank] = self._open(rank)
        return self._files[rank]

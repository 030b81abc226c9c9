"""Creation of HDF5 files on disks that may fill up. Does not use MPI.

If HDF5 cannot write its cached metadata, closing the file crashes the process. Files are therefore written through a
Python stream that discards all writes after the first error, so that closing the file always succeeds.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py


@contextmanager
def create_hdf5(path: Path | str, **options: Any) -> Iterator[h5py.File]:
    """Context manager that creates a new HDF5 file and closes it on exit. Raises `FileExistsError` if `path` exists.

    If a write fails, for example because the disk is full, `OSError` is raised on exit, and the file is incomplete.
    `options` are passed to `h5py.File`.
    """
    with Path(path).open("xb+", buffering=0) as raw:
        stream = _Stream(raw)
        try:
            with h5py.File(stream, "w", **options) as file:
                yield file
        finally:
            # Replaces an error of HDF5, which does not know the reason.
            if stream.error is not None:
                raise OSError(stream.error.errno, stream.error.strerror, str(path)) from stream.error


class _Stream:
    """Stream over a raw file, with the methods that h5py requires. It discards all writes after the first error."""

    def __init__(self, raw: io.FileIO) -> None:
        self._raw = raw
        self.error: OSError | None = None
        self.seek, self.tell, self.read, self.readinto = raw.seek, raw.tell, raw.read, raw.readinto

    def write(self, content: memoryview) -> int:
        begin = self._raw.tell()
        try:
            num_written = 0
            while self.error is None and num_written < len(content):
                num_written += self._raw.write(content[num_written:])
        except OSError as error:
            self.error = error
        self._raw.seek(begin + len(content))
        return len(content)

    def truncate(self, num_bytes: int) -> int:
        try:
            if self.error is None:
                return self._raw.truncate(num_bytes)
        except OSError as error:
            self.error = error
        return num_bytes

    def flush(self) -> None:
        """Do nothing, since the raw file has no buffer."""

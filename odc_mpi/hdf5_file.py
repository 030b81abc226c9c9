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
    with _Stream(path, "xb+") as stream:
        try:
            with h5py.File(stream, "w", **options) as file:
                yield file
        finally:
            # Replaces an error of HDF5, which does not know the reason.
            if stream.error is not None:
                raise OSError(stream.error.errno, stream.error.strerror, str(path)) from stream.error


class _Stream(io.FileIO):
    """Raw file that discards all writes after the first error."""

    error: OSError | None = None

    def write(self, content: memoryview) -> int:  # type: ignore[override]
        begin = self.tell()
        try:
            num_written = 0
            while self.error is None and num_written < len(content):
                num_written += super().write(content[num_written:])
        except OSError as error:
            self.error = error
        self.seek(begin + len(content))
        return len(content)

    def truncate(self, num_bytes: int) -> int:  # type: ignore[override]
        try:
            if self.error is None:
                return super().truncate(num_bytes)
        except OSError as error:
            self.error = error
        return num_bytes

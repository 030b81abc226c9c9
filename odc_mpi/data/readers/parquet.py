"""Reading Parquet files in batches of rows, in bounded memory. Requires pyarrow, which the extra `parquet` installs."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from odc_mpi.data.readers.records import Block, without_nulls
from odc_mpi.errors import UserError, one_line_message

SUFFIX = ".parquet"
_BATCH_ROWS = 256
#: Number of bytes of a column to read at a time. A complete row group may be as large as the file.
_BUFFER_BYTES = 1 << 20


def read_rows(path: Path, on_bytes_read: Callable[[int], None]) -> Iterator[Block]:
    """Yield the rows of a file in blocks, in the order of the file. Columns with dates or times are omitted.

    The number of bytes passed to `on_bytes_read` is approximate. Raises a `UserError` if the file or a value cannot be
    read, or if pyarrow is missing.
    """
    pyarrow = _library(str(path))
    size, done = path.stat().st_size, 0
    with _opened(path) as file:
        total = max(1, file.metadata.num_rows)
        for batch in file.iter_batches(_BATCH_ROWS, use_threads=False):
            numbers = list(range(done + 1, done + batch.num_rows + 1))
            # Omit columns of times: they contain no text, and Python cannot represent nanoseconds.
            no_times = [i for i, field in enumerate(batch.schema) if not pyarrow.types.is_temporal(field.type)]
            try:
                rows = [without_nulls(row) for row in batch.select(no_times).to_pylist()]
            except (ValueError, OverflowError) as error:  # a nested time that Python cannot represent
                place = f"{path}, rows {numbers[0]} to {numbers[-1]}"
                raise UserError(f"{place}: cannot be read ({one_line_message(error)}): change SOURCE") from error
            yield Block(str(path), "row", numbers, rows)
            done += batch.num_rows
            on_bytes_read(size * batch.num_rows // total)


def count_rows(path: Path) -> int:
    """Return the number of rows. Raises a `UserError` if the file cannot be read, or if pyarrow is missing."""
    with _opened(path) as file:
        return int(file.metadata.num_rows)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file, and convert read errors in the `with` body to a `UserError` that contains the path."""
    pyarrow = _library(str(path))
    try:
        # ParquetFile itself opens only files whose names are UTF-8.
        with (
            pyarrow.OSFile(os.fsencode(path)) as stream,
            pyarrow.parquet.ParquetFile(stream, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file,
        ):
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read ({one_line_message(error)}); the file may be truncated") from error


def _library(name: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"reading {name!r} requires the package pyarrow: pip install 'odc_mpi[parquet]'") from error
    return pyarrow

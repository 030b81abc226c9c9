"""Reading data in Arrow's format: Parquet files, and data sets of the library `datasets`.

The libraries pyarrow and datasets are imported only if the user specifies such a source. Code in data sets is never
run, because the library `datasets` has not supported it since version 4.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from odc_mpi.data.records.block import Block
from odc_mpi.errors import UserError, one_line_message

PARQUET_SUFFIX = ".parquet"
_BATCH_ROWS = 256
#: Number of bytes of a column to read at a time. A complete row group may be as large as the file.
_BUFFER_BYTES = 1 << 20
#: Owner and name on the Hub, optionally with a configuration, such as "openai/gsm8k/main".
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(/[\w.-]+)?")
_DEFAULT_SPLIT = "train"


def read_parquet(path: Path, on_bytes_read: Callable[[int], None]) -> Iterator[Block]:
    """Yield the rows of a Parquet file in blocks, in file order. Columns with dates or times are omitted.

    The number of bytes passed to `on_bytes_read` is approximate. Raises a `UserError` if the file or a value cannot be
    read, or if pyarrow is missing.
    """
    num_rows_read = 0
    with _opened(path) as file:
        from pyarrow.types import is_temporal

        size = path.stat().st_size
        total = max(1, file.metadata.num_rows)
        for batch in file.iter_batches(_BATCH_ROWS, use_threads=False):
            # Omit columns of times: they contain no text, and Python cannot represent nanoseconds.
            no_times = [i for i, field in enumerate(batch.schema) if not is_temporal(field.type)]
            try:
                rows = [_without_nulls(row, batch.schema, json.loads) for row in batch.select(no_times).to_pylist()]
            except (ValueError, OverflowError) as error:  # a nested time that Python cannot represent
                place = f"{path}, rows {num_rows_read + 1} to {num_rows_read + batch.num_rows}"
                raise UserError(f"{place}: cannot be read ({one_line_message(error)}): change SOURCE") from error
            yield Block(str(path), "row", list(enumerate(rows, num_rows_read + 1)))
            num_rows_read += batch.num_rows
            on_bytes_read(size * batch.num_rows // total)


def count_rows(path: Path) -> int:
    """Return the number of rows in a Parquet file. Raises a `UserError` if it cannot be read, or pyarrow is missing."""
    with _opened(path) as file:
        return int(file.metadata.num_rows)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file, and convert read errors in the `with` body to a `UserError` that contains the path."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"reading {str(path)!r} requires the package pyarrow: pip install 'odc_mpi[parquet]'"
        ) from error
    try:
        # ParquetFile itself opens only files whose names are UTF-8.
        with (
            pyarrow.OSFile(os.fsencode(path)) as stream,
            pyarrow.parquet.ParquetFile(stream, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file,
        ):
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read ({one_line_message(error)}); the file may be truncated") from error


def is_saved_dataset(path: Path) -> bool:
    """Return True if `path` is a directory written by `save_to_disk`."""
    names = (("state.json", "dataset_info.json"), ("dataset_dict.json",))
    return any(all((path / name).is_file() for name in each) for each in names)


def is_hub_name(name: str) -> bool:
    """Return True if `name` has the form of a data set name on the Hub: owner/name or owner/name/configuration."""
    return _HUB_NAME.fullmatch(name) is not None


def load(name: str, split: str | None) -> Any:
    """Load a `datasets.Dataset`, whose rows are read on demand. A data set on the Hub is downloaded if necessary.

    `name` is a directory written by `save_to_disk`, or the name of a data set on the Hub. On the Hub, `split` may
    include a slice, as in "train[:1%]". None selects the only split if a directory has just one, or else "train".
    Raises a `UserError` if the library is missing, or if the data set or split cannot be loaded.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{name!r} is not a file or folder of files; reading it as a data set of Hugging Face requires the package "
            "datasets: pip install 'odc_mpi[datasets]'"
        ) from error
    datasets.disable_progress_bars()
    try:
        if not Path(name).is_dir():
            owner, title, *configuration = name.split("/")
            return datasets.load_dataset(f"{owner}/{title}", *configuration, split=split or _DEFAULT_SPLIT)
        loaded = datasets.load_from_disk(name)
    except Exception as error:  # of many kinds: no network, no permission, damaged files
        raise UserError(
            f"the data set {name!r} cannot be loaded ({one_line_message(error)}): change SOURCE or --split"
        ) from error
    splits = dict(loaded) if isinstance(loaded, dict) else {str(loaded.split or _DEFAULT_SPLIT): loaded}
    chosen = split or (next(iter(splits)) if len(splits) == 1 else _DEFAULT_SPLIT)
    if chosen not in splits:
        raise UserError(f"--split: expected one of {', '.join(splits)} for {name!r}, got {chosen!r}")
    return splits[chosen]


def read_rows(name: str, dataset: Any, on_bytes_read: Callable[[int], None], num_bytes: int) -> Iterator[Block]:
    """Yield the rows of a data set in blocks. Columns with images, audio or other media are omitted.

    `num_bytes` is the size of the data set's files. `on_bytes_read` receives a share of this size proportional to the
    number of rows read. Raises a `UserError` if rows cannot be read.
    """
    # Features of media have the attribute `decode`, and would be decoded. `Json` has it, too, but should be decoded.
    columns = [
        column
        for column, feature in dataset.features.items()
        if not hasattr(feature, "decode") or type(feature).__name__ == "Json"
    ]
    dataset, schema = dataset.with_format(None).select_columns(columns), dataset.features.arrow_schema
    for begin in range(0, len(dataset), _BATCH_ROWS):
        try:
            batch = dataset[begin : begin + _BATCH_ROWS]
        except Exception as error:  # damaged files, missing libraries for nested media
            raise UserError(f"{name}, row {begin + 1}: cannot be read ({one_line_message(error)})") from error
        rows = [_without_nulls(dict(zip(batch, row, strict=True)), schema) for row in zip(*batch.values(), strict=True)]
        yield Block(name, "row", list(enumerate(rows, begin + 1)))
        on_bytes_read(num_bytes * len(rows) // len(dataset))


def _without_nulls(value: Any, type_: Any, decode: Callable[[Any], Any] = lambda value: value) -> Any:
    """Return a row of a table, or a value in one, without nulls of the row and of structures, which have all fields.

    `type_` is the schema of the row, or the type of the value. Values of the type `arrow.json` are what `decode`
    returns for them: their nulls and fields are those of the source.
    """
    if value is not None and getattr(type_, "extension_name", "") == "arrow.json":
        return decode(value)
    if isinstance(value, dict):
        types = {field.name: field.type for field in type_}
        return {name: _without_nulls(item, types[name], decode) for name, item in value.items() if item is not None}
    if isinstance(value, list) and hasattr(type_, "value_type"):
        return [_without_nulls(item, type_.value_type, decode) for item in value]
    return value

"""Reading JSON lines, JSON arrays, CSV and TSV in blocks of records. Files may be compressed with gzip or Zstandard."""

import codecs
import csv
import importlib
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from odc_mpi.data.records.block import Block
from odc_mpi.data.records.fields import InvalidRecordError
from odc_mpi.errors import UserError

try:
    from isal.igzip import GzipFile  # several times as fast
    from isal.isal_zlib import error as gzip_error
except ImportError:
    from gzip import GzipFile  # type: ignore[assignment]
    from zlib import error as gzip_error  # type: ignore[assignment]

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
ARRAY_SUFFIX = ".json"
#: Suffixes of files in a folder. A source that is a file may have any suffix, and is read as JSON lines by default.
SUFFIXES = (".jsonl", ".ndjson", *_DELIMITERS, ARRAY_SUFFIX)
COMPRESSED_SUFFIXES = (".gz", ".zst")
#: Modules with the class `ZstdFile`: in Python 3.14 or later, and its backport.
_ZSTD_MODULES = ("compression.zstd", "backports.zstd")

#: Characters of text in a block: enough to keep a process busy, but few enough to keep the tokens' offsets in memory.
_BLOCK_CHARS = 1 << 19
_BLOCK_RECORDS = 1024
_REPORTED_RECORDS = 1024  # between two calls of `on_bytes_read`
_READ_CHARS = 1 << 20  # of an array at a time
#: If decoding fails within this number of characters of the end of the buffer, the value may be incomplete: `-Infinit`.
_INCOMPLETE_CHARS = 12
_SPACE = re.compile(r"[ \t\n\r]*")
_SHOWN_CHARS = 30  # of invalid text
_MAX_VALUE_CHARS = 1 << 27  # of a cell or an array's item: an open quote or bracket must not load the complete file


#: Number, value and size in characters of each item in a file.
_Items = Iterator[tuple[int, Any, int]]


def bare_suffix(path: Path) -> str:
    """Return the suffix of a file name in lowercase, ignoring .gz and .zst, such as ".csv" for "a.csv.gz"."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED_SUFFIXES else path).suffix.lower()


def read_records(path: Path, on_bytes_read: Callable[[int], None]) -> Iterator[Block]:
    """Yield a file's records in blocks, in file order.

    A file is a table if its name ends in .csv or .tsv, a JSON array if its content begins with ``[``, and JSON lines
    otherwise. If the name also ends in .gz or .zst, the file is decompressed. For `on_bytes_read`, see
    `DataSource.read`. Raises a `UserError` if the file cannot be read or decompressed, or a JSON array is invalid.
    """
    unit, items = _open(path, on_bytes_read)
    records: list[tuple[int, Any]] = []
    num_chars = 0
    for number, value, size in items:
        records.append((number, value))
        num_chars += size
        if num_chars >= _BLOCK_CHARS or len(records) >= _BLOCK_RECORDS:
            yield Block(str(path), unit, records)
            records, num_chars = [], 0
    if records:
        yield Block(str(path), unit, records)


def count_records(path: Path) -> int:
    """Return the number of records, including invalid ones. Raises a `UserError` if the file cannot be read."""
    return sum(1 for _ in _open(path, lambda _: None)[1])


def is_array(path: Path) -> bool:
    """Return True if the content of a file begins with ``[``. Raises a `UserError` if the file cannot be read."""
    try:
        with path.open("rb") as file:
            begin: bytes = _decompress(file, path).peek(1)
    except _decompression_errors() as error:
        raise _error(path, "line 1", error) from error
    return begin.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _open(path: Path, on_bytes_read: Callable[[int], None]) -> tuple[str, _Items]:
    """Return the unit of a file's items, and the items."""
    unit, find_items = "line", _lines
    if delimiter := _DELIMITERS.get(bare_suffix(path)):
        find_items = partial(_rows, delimiter=delimiter)
    elif is_array(path):
        unit, find_items = "element", _elements
    return unit, _read_items(path, unit, find_items, on_bytes_read)


def _read_items(
    path: Path, unit: str, find_items: Callable[[Any], _Items], on_bytes_read: Callable[[int], None]
) -> _Items:
    number = position = 0
    errors: tuple[type[Exception], ...] = (*_decompression_errors(), csv.Error, ValueError, RecursionError)
    try:
        with path.open("rb") as file:
            stream = _decompress(file, path)
            if stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise UserError(f"{path}: expected UTF-8, got UTF-16: convert it with iconv -f UTF-16 -t UTF-8")
            if find_items is not _lines:
                # Bytes that are not UTF-8 become surrogates, which `parse_example` rejects in the affected record.
                stream = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
            for index, (number, value, num_chars) in enumerate(find_items(stream), start=1):
                if index % _REPORTED_RECORDS == 0:
                    on_bytes_read(file.tell() - position)
                    position = file.tell()
                yield number, value, num_chars
            on_bytes_read(file.tell() - position)
    except UserError:  # is a ValueError
        raise
    except errors as error:
        raise _error(path, f"{unit} {number + 1}", error) from error


def _decompress(file: BinaryIO, path: Path) -> Any:
    """Return a stream, with `peek`, of a file's decompressed bytes. Raises a `UserError` if a library is missing."""
    if path.suffix.lower() == ".gz":
        return GzipFile(fileobj=file, mode="rb")
    if path.suffix.lower() != ".zst":
        return file
    for module in _ZSTD_MODULES:
        with suppress(ImportError):
            return io.BufferedReader(importlib.import_module(module).ZstdFile(file), 1 << 20)
    raise UserError(f"reading {str(path)!r} requires the package backports.zstd: pip install 'odc_mpi[zstd]'")


def _decompression_errors() -> tuple[type[Exception], ...]:
    zstd_errors = (sys.modules[module].ZstdError for module in _ZSTD_MODULES if sys.modules.get(module))
    return (OSError, EOFError, zlib.error, gzip_error, *zstd_errors)


def _error(path: Path, place: str, error: Exception) -> UserError:
    if isinstance(error, OSError) and error.errno:
        return UserError(f"cannot read {path}: {error.strerror}")
    return UserError(f"{path}, {place}: cannot be read ({error}); the file may be damaged, or in another format")


def _lines(stream: Any) -> _Items:
    for number, line in enumerate(stream, start=1):
        if number == 1:
            # Some editors on Windows begin files with a byte order mark.
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.isspace() and line:
            yield number, line, len(line)


def _rows(stream: TextIO, delimiter: str) -> _Items:
    """Yield each row of a table, with the number of its first line. The first row contains the column names."""
    csv.field_size_limit(_MAX_VALUE_CHARS)
    reader = csv.reader(stream, delimiter=delimiter, strict=True)
    names = next(reader, [])
    named = [name for name in names if name]  # spreadsheets add empty columns
    if len(set(named)) < len(named):
        raise ValueError("expected column names in the first line, got a name twice")
    while True:
        number = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield number, InvalidRecordError(f"expected a row in lines {number} to {reader.line_num}, got {error}"), 0
            continue
        if len(row) == len(names):
            yield number, dict(zip(names, row, strict=True)), sum(map(len, row))
        elif row:
            yield number, InvalidRecordError(f"expected {len(names)} columns as in the first line, got {len(row)}"), 0


def _elements(stream: TextIO) -> _Items:
    """Yield each element of a JSON array as soon as it is complete."""
    array = _JsonArray(stream)
    array.take("[")
    number = 0
    while array.peek() != "]":
        if number:
            array.take(",")
        number += 1
        yield number, *array.decode()
    array.take("]")
    array.take("")


class _JsonArray:
    """JSON array in a text stream, which is read in parts. The methods raise a `ValueError` for invalid text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._text, self._position = "", 0
        self._offset = 0  # of `_text` in the file, in characters
        self._raw_decode = json.JSONDecoder().raw_decode

    def peek(self) -> str:
        """Return the next character that is not whitespace, or "" at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._position)
            assert match is not None
            self._position = match.end()
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._extend():
                return ""

    def take(self, character: str) -> None:
        """Skip a character, which must be the next one that is not whitespace. "" is the end of the file."""
        next_character = self.peek()
        if next_character != character:
            expected, got = (repr(each) if each else "the end of the file" for each in (character, next_character))
            raise self._error(f"expected {expected} in a JSON array, got {got}", self._position)
        self._position += len(character)

    def decode(self) -> tuple[Any, int]:
        """Return the next value and its number of characters, and skip it."""
        self.peek()
        while True:
            begin = self._position
            try:
                value, end = self._raw_decode(self._text, begin)
            except json.JSONDecodeError as error:
                near_end = error.pos + _INCOMPLETE_CHARS > len(self._text) or error.msg.startswith("Unterminated")
                if near_end and len(self._text) - begin < _MAX_VALUE_CHARS and self._extend():
                    continue
                raise self._error(error.msg, error.pos) from error
            if end < len(self._text) or not self._extend():  # more digits of a number may follow
                self._position = min(end, len(self._text))
                return value, self._position - begin

    def _extend(self) -> bool:
        """Read at least as much text as remains, so that few values are decoded twice. Returns False at the end."""
        rest = self._text[self._position :]
        if more := self._stream.read(max(_READ_CHARS, len(rest))):
            self._offset += self._position
            self._text, self._position = rest + more, 0
        return bool(more)

    def _error(self, message: str, position: int) -> ValueError:
        next_characters = self._text[position : position + _SHOWN_CHARS]
        text = f", {next_characters!r}" if next_characters else ""
        return ValueError(f"{message} at character {self._offset + position + 1:,}{text}")

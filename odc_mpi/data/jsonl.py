"""Reading JSON lines in blocks. Files may be compressed with gzip or Zstandard. `examples` parses the lines."""

import codecs
import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from odc_mpi.data.examples import parse_json
from odc_mpi.errors import UserError

SUFFIXES = (".jsonl", ".ndjson")
COMPRESSED = (".gz", ".zst")
#: Bytes of text in a block: enough to keep a process busy, and few enough to keep the tokens' offsets in memory.
_BLOCK_BYTES = 1 << 19
_BLOCK_LINES = 1024
#: Number of compressed bytes to read at a time.
_PACKED_BYTES = 1 << 14

#: Function that returns how often to use a line or row. It is called once for each, in the order of the file.
RepeatFn = Callable[[], int]


@dataclass(frozen=True)
class LineBlock:
    """Some lines of a file that are not blank.

    Attributes:
        name: Path of the file.
        numbers: Line number of each line, from 1.
        lines: Content of each line.
    """

    name: str
    numbers: list[int]
    lines: list[bytes]

    def records(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """Yield, for each line, its location for error messages and a function that returns the record.

        The function raises an InvalidRecordError if the line is not a JSON object.
        """
        for number, line in zip(self.numbers, self.lines, strict=True):
            location = f"{self.name}, line {number}"
            yield location, lambda line=line, where=location: parse_json(line, where)  # type: ignore[misc]


def read_lines(path: Path, num_repeats: RepeatFn, on_bytes_read: Callable[[int], None]) -> Iterator[LineBlock]:
    """Yield the lines of a file in blocks, in the order of the file, without blank lines.

    The file is decompressed if its name ends in .gz or .zst. `DataSource.read` explains the other arguments.

    Raises:
        UserError: The file cannot be read or decompressed, or the package zstandard is missing.
    """
    block, size = LineBlock(str(path), [], []), 0
    for number, line in _numbered(path, on_bytes_read):
        for _ in range(num_repeats()):
            block.numbers.append(number)
            block.lines.append(line)
            size += len(line)
            if size >= _BLOCK_BYTES or len(block.lines) >= _BLOCK_LINES:
                yield block
                block, size = LineBlock(str(path), [], []), 0
    if block.lines:
        yield block


def count_lines(path: Path) -> int:
    """Return the number of lines that are not blank. Raises a UserError if the file cannot be read."""
    return sum(1 for _ in _numbered(path, lambda _: None))


def _numbered(path: Path, on_bytes_read: Callable[[int], None]) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the content of each line that is not blank."""
    number = position = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_decompressed(file, path), start=1):
                if number == 1:
                    # Some editors on Windows begin files with a byte order mark.
                    line = line.removeprefix(codecs.BOM_UTF8)
                if number % _BLOCK_LINES == 0:
                    on_bytes_read(file.tell() - position)
                    position = file.tell()
                if not line.isspace() and line:
                    yield number, line
            on_bytes_read(file.tell() - position)
    except _decompression_errors() as error:
        raise UserError(f"{path}, line {number + 1}: cannot be read ({error}); the file may be truncated") from error


def _decompressed(file: BinaryIO, path: Path) -> BinaryIO:
    """Return a stream of the file's decompressed bytes."""
    if path.suffix == ".gz":
        return cast(BinaryIO, _gzip_file()(fileobj=file, mode="rb"))
    if path.suffix == ".zst":
        return cast(BinaryIO, io.BufferedReader(_open_zstd(file, path), 1 << 20))
    return file


def _gzip_file() -> Any:
    try:
        from isal.igzip import GzipFile  # several times as fast
    except ImportError:
        return gzip.GzipFile
    return GzipFile


def _open_zstd(file: BinaryIO, path: Path) -> Any:
    """Open a Zstandard file with the standard library (Python 3.14 or later), or else with the package zstandard."""
    with suppress(ImportError):
        from compression import zstd  # type: ignore[import-not-found]

        return zstd.ZstdFile(file)
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"reading {str(path)!r} requires the package zstandard: pip install 'odc_mpi[zstd]'") from error
    return _ZstdText(file, zstandard.ZstdDecompressor())


class _ZstdText(io.RawIOBase):
    """Stream of the decompressed bytes of Zstandard frames.

    It raises an error if the file is truncated. The stream of the package zstandard would end silently.
    """

    def __init__(self, file: BinaryIO, decompressor: Any) -> None:
        self._file, self._decompressor = file, decompressor
        self._frame: Any = None
        self._rest = self._text = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text and (packed := self._rest or self._file.read(_PACKED_BYTES)):
            self._frame = self._frame or self._decompressor.decompressobj()
            self._text = self._frame.decompress(packed)
            self._rest = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        if not self._text and self._frame:
            raise EOFError("it ends within a Zstandard frame")
        count = min(len(buffer), len(self._text))
        buffer[:count], self._text = self._text[:count], self._text[count:]
        return count


def _decompression_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that the imported libraries raise for damaged data."""
    errors: list[type[Exception]] = [OSError, EOFError, zlib.error]
    for module, name in (("isal.isal_zlib", "error"), ("zstandard", "ZstdError"), ("compression.zstd", "ZstdError")):
        if loaded := sys.modules.get(module):
            errors.append(getattr(loaded, name))
    return tuple(errors)

"""Decompression of gzip and Zstandard files, which are recognized by the suffixes .gz and .zst."""

import gzip
import io
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from odc_mpi.errors import UserError

SUFFIXES = (".gz", ".zst")
#: Number of compressed bytes to read at a time.
_PACKED_BYTES = 1 << 14


def bare_suffix(path: Path) -> str:
    """Return the lowercase suffix of a file name without .gz or .zst, such as ".csv" for "a.csv.gz"."""
    return (path.with_suffix("") if path.suffix.lower() in SUFFIXES else path).suffix.lower()


def decompressed(file: BinaryIO, path: Path) -> Any:
    """Return a stream, with `peek`, of a file's decompressed bytes. Raises a `UserError` if zstandard is missing."""
    if path.suffix.lower() == ".gz":
        return _gzip_file()(fileobj=file, mode="rb")
    if path.suffix.lower() == ".zst":
        return io.BufferedReader(_open_zstd(file, path), 1 << 20)
    return file


def _gzip_file() -> Any:
    try:
        from isal.igzip import GzipFile  # several times as fast
    except ImportError:
        return gzip.GzipFile
    return GzipFile


def _open_zstd(file: BinaryIO, path: Path) -> Any:
    """Open a Zstandard file with the standard library (Python 3.14 or later), otherwise with the package zstandard."""
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

    If the file is truncated, reading raises an error, whereas the stream of the package zstandard would end silently.
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


def decompression_errors() -> tuple[type[Exception], ...]:
    """Return the types of the exceptions that the imported libraries raise for damaged data."""
    errors: list[type[Exception]] = [OSError, EOFError, zlib.error]
    for module, name in (("isal.isal_zlib", "error"), ("zstandard", "ZstdError"), ("compression.zstd", "ZstdError")):
        if loaded := sys.modules.get(module):
            errors.append(getattr(loaded, name))
    return tuple(errors)

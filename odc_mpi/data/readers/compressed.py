"""Decompression of gzip and Zstandard files, which are recognized by the suffixes .gz and .zst."""

import gzip
import importlib
import io
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from odc_mpi.errors import UserError

SUFFIXES = (".gz", ".zst")
#: Modules with the class `ZstdFile`: in Python 3.14 or later, and its backport.
_ZSTD_MODULES = ("compression.zstd", "backports.zstd")


def bare_suffix(path: Path) -> str:
    """Return the lowercase suffix of a file name without .gz or .zst, such as ".csv" for "a.csv.gz"."""
    return (path.with_suffix("") if path.suffix.lower() in SUFFIXES else path).suffix.lower()


def decompressed(file: BinaryIO, path: Path) -> Any:
    """Return a stream, with `peek`, of a file's decompressed bytes. Raises a `UserError` if a library is missing."""
    if path.suffix.lower() == ".gz":
        return _gzip_file()(fileobj=file, mode="rb")
    if path.suffix.lower() == ".zst":
        return io.BufferedReader(_zstd_file(path)(file), 1 << 20)
    return file


def _gzip_file() -> Any:
    try:
        from isal.igzip import GzipFile  # several times as fast
    except ImportError:
        return gzip.GzipFile
    return GzipFile


def _zstd_file(path: Path) -> Any:
    for module in _ZSTD_MODULES:
        with suppress(ImportError):
            return importlib.import_module(module).ZstdFile
    raise UserError(f"reading {str(path)!r} requires the package backports.zstd: pip install 'odc_mpi[zstd]'")


def decompression_errors() -> tuple[type[Exception], ...]:
    """Return the types of the exceptions that the imported libraries raise for damaged data."""
    errors: list[type[Exception]] = [OSError, EOFError, zlib.error]
    for module, name in (("isal.isal_zlib", "error"), *((module, "ZstdError") for module in _ZSTD_MODULES)):
        if loaded := sys.modules.get(module):
            errors.append(getattr(loaded, name))
    return tuple(errors)

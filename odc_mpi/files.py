"""Atomic and durable writing of files and directories, and parsing of JSON. Does not use MPI."""

import errno
import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from odc_mpi.errors import UserError, warn


def set_default_mode(path: Path) -> None:
    """Give a file the default permissions of new files. `mkstemp` and safetensors create files with mode 0600."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Context manager that yields a temporary path and, on exit, renames the file written there to `path`.

    Readers get either the old or the new file, even after a crash of the node. The temporary path is in a hidden
    directory next to `path`. Hidden directories that killed processes left behind for the same `path` are removed
    first. Missing parents of `path` are created. If the `with` block raises an exception, `path` is unchanged and the
    created directories are removed.
    """
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        make_directory(path.parent)
        for left in path.parent.glob(f".{glob.escape(path.name)}.{'?' * 8}.tmp"):
            with suppress(OSError), _locked(left):
                shutil.rmtree(left)
        with (
            tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp") as hidden,
            ExitStack() as stack,
        ):
            with suppress(OSError):  # not every file system has locks
                stack.enter_context(_locked(Path(hidden)))
            new = Path(hidden, path.name)
            yield new
            sync(new)
            new.replace(path)
        sync(path.parent)
    except BaseException:
        for folder in missing:
            with suppress(OSError):  # not created, or another process has created files in it
                folder.rmdir()
        raise


def write_text_durable(path: Path, text: str, *, private: bool = False) -> None:
    """Replace a file's content atomically and durably. The file's directory must exist.

    Readers get either the old or the new content, even after a crash of the node. If the new content cannot be written,
    the file is unchanged. If several processes write to the same path, the last write determines the content. If
    `private` is True, only the current user can access the file.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    new = Path(temporary)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        if not private:
            set_default_mode(new)
        sync(new)
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise
    sync(path.parent)


def read_lines(path: Path) -> list[str]:
    """Return a file's lines, [] if it is missing. Only line feeds end a line: JSON may contain U+2028 and the like.

    Bytes that are not UTF-8 become lone surrogates, for which `write_text_durable` writes the original bytes.
    """
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        return list(file)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Context manager that locks a directory. Raises `OSError` if another process has locked it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def write_or_warn(path: Path, text: str) -> None:
    """Write a file in a run directory with `write_text_durable`, but print a warning instead of raising `OSError`."""
    try:
        write_text_durable(path, text)
    except OSError as error:
        warn_write_failed(path, error)


def warn_write_failed(path: Path, error: OSError) -> None:
    """Print a warning that a file in a run directory could not be written and that training continues."""
    warn(f"WARNING: cannot write {path}: {error.strerror}. The file is incomplete or missing; training continues")


def parse_json(content: str | bytes) -> Any:
    """Parse JSON. Raises `ValueError` for any invalid content, including content that is nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_settings(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Return {} if the file is missing. Raise `UserError` if it is invalid."""
    try:
        content = parse_json(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not isinstance(content, dict):
            raise ValueError(type(content).__name__)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected a JSON object of settings, got {error}") from error
    return content


def sync(path: Path) -> None:
    """Flush a file to disk, or the entries of a directory if the file system supports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create a directory and any missing parents, and flush their directory entries to disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with suppress(PermissionError):  # a parent may be writable without being readable
            sync(folder.parent)

"""Files that appear whole or not at all, and names that a crash does not lose. Local; knows no format and no MPI."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from odc_mpi.errors import warn


def write_text_durable(path: Path, text: str) -> None:
    """Replace a file; a reader sees the old or the new content, also after a crash.

    One process at a time may call this for a path: the temporary file beside it always has the same name.

    Raises:
        OSError: The file cannot be written; the old one stays.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # or a crash of the node could leave the new name with no content
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)


def write_text_atomic(path: Path, text: str, *, private: bool) -> None:
    """Replace a file; a reader sees the old or the new content. After a crash the file may be empty.

    Several processes may call this for a path: each has a temporary file of its own, and the last one wins.

    Args:
        path: The file, in a directory that exists.
        text: The new content.
        private: Whether only this user may read the file; else it has the permissions of any new file.

    Raises:
        OSError: The file cannot be written; the old one stays.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        if not private:  # mkstemp makes a file of mode 0600
            umask = os.umask(0)
            os.umask(umask)
            Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except OSError:
        with suppress(OSError):
            Path(temporary).unlink()
        raise


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Offer a path to write a new file to; rename that file to `path` when the body ends well.

    The new path is in a hidden directory beside `path`, which goes on any exception, with the parent directories that
    were made for it; then the old file stays as it was.

    Raises:
        OSError: The directories cannot be made, or the file cannot be renamed.
    """
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        make_directory(path.parent)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp") as hidden:
            new = Path(hidden, path.name)
            yield new
            sync_file(new)
            new.replace(path)
        sync_directory(path.parent)
    except BaseException:
        for folder in missing:
            with suppress(OSError):  # not made, or somebody else has put something into it
                folder.rmdir()
        raise


def write_or_warn(path: Path, text: str) -> None:
    """Write a file of a run, or warn that it is lost: no such file is worth ending the run."""
    try:
        write_text_durable(path, text)
    except OSError as error:
        warn_write_failed(path, error)


def warn_write_failed(path: Path, error: OSError) -> None:
    """Warn that a file, or a part of it, is lost, and that the run goes on."""
    warn(f"WARNING: cannot write {path}: {error.strerror}: it is incomplete or missing; the run goes on without")


def sync_file(path: Path) -> None:
    """Flush the content of a file to the disk; else a crash could leave an empty file under a good name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to the disk, where the file system supports it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, and flush their names to the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with suppress(PermissionError):  # where one may add names and not see them
            sync_directory(folder.parent)

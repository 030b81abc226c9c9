"""Files that appear whole or not at all, and names that a crash does not lose. Local; knows no format and no MPI."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from odc_mpi.errors import warn


def replace_text(path: Path, text: str) -> None:
    """Write a file such that a reader, and whoever comes after a crash, sees the old one or the new one. Local.

    One process at a time may, as the temporary file beside it always has the same name.

    Raises:
        OSError: It cannot be written; the old one stays.
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


def swap_text(path: Path, text: str, *, private: bool) -> None:
    """Write a file such that a reader sees the old one or the new one; after a crash it may be empty. Local.

    Any number of processes may at a time: each has a temporary file of its own, and the last one wins.

    Args:
        path: In a folder that exists.
        text: What it is to hold.
        private: For this user only; else as any new file of this process.

    Raises:
        OSError: It cannot be written; the old one stays.
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
def replacing(path: Path) -> Iterator[Path]:
    """Offer a path to write a new file to; rename that file to `path` when the body ends well. Local.

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


def keep(path: Path, text: str) -> None:
    """Write a file of a run that is under way, or say loudly that it is lost: none is worth the run. Local."""
    try:
        replace_text(path, text)
    except OSError as error:
        warn_lost(path, error)


def warn_lost(path: Path, error: OSError) -> None:
    """Say that a file, or a part of it, is lost, and that the run goes on. Local."""
    warn(f"WARNING: cannot write {path}: {error.strerror}: it is incomplete or missing; the run goes on without")


def sync_file(path: Path) -> None:
    """See the content of a file on the disk, or a crash could leave an empty file under a good name. Local."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """See the names in a directory on the disk, where the file system can tell. Local."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory, and those above it that are missing, with their names on the disk. Local."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with suppress(PermissionError):  # where one may add names and not see them
            sync_directory(folder.parent)

"""Files that rank 0 leaves of a run: each whole or not at all, and none is worth the run. Local."""

import os
import sys
from contextlib import suppress
from pathlib import Path

from odc_mpi.checkpoint.saver import sync


def replace_text(path: Path, text: str) -> None:
    """Write a file such that a reader, and whoever comes after a crash, sees the old one or the new one. Local.

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
    sync(path.parent)


def keep(path: Path, text: str) -> None:
    """Write a file of a run that is under way, or say loudly that it is lost. Local."""
    try:
        replace_text(path, text)
    except OSError as error:
        warn_lost(path, error)


def warn_lost(path: Path, error: OSError) -> None:
    """Say that a file, or a part of it, is lost, and that the run goes on. Local."""
    warn(f"WARNING: cannot write {path}: {error.strerror}: it is incomplete or missing; the run goes on without")


def warn(line: str) -> None:
    """Print a line that a person must see. Local."""
    print(f"odc_mpi: {line}", file=sys.stderr, flush=True)

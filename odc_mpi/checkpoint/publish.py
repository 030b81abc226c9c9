"""Publishing, replacing and removing checkpoint directories. A crash at any time leaves only complete checkpoints.

Note: retired checkpoints
    A checkpoint is retired, that is, renamed to a hidden name, before it is replaced or pruned. A replaced checkpoint
    is removed only after its replacement has been published and flushed to disk. The removal of a retired directory
    begins with its manifest, so a retired directory with a manifest is complete, and `recover_retired` restores its
    name unless another checkpoint has that name.
"""

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from odc_mpi.checkpoint.index import MAX_INDEXED_RANKS, write_index
from odc_mpi.checkpoint.manifest import INDEX, MANIFEST, Manifest, steps_in, write_manifest
from odc_mpi.files import sync

#: Prefixes of the hidden directories of checkpoints that are being written, and of retired checkpoints.
_UNFINISHED, _RETIRED = ".step_", ".retired_"


def publish(directory: Path, manifest: Manifest, goal: Path) -> None:
    """Publish `directory`, which contains all ranks' files, by atomically renaming it to the checkpoint `goal`.

    The manifest and, unless there are many ranks, the index are written to `directory` first. `manifest` must
    contain all ranks' file records. `directory` and `goal` must have the same parent. An existing `goal` is replaced.
    """
    files = dict(manifest.files)
    if manifest.size <= MAX_INDEXED_RANKS:
        files[INDEX] = write_index(directory / INDEX, directory, manifest)
    write_manifest(directory / MANIFEST, replace(manifest, files=files))
    sync(directory)
    if goal.exists():
        _retire(goal)
    try:
        directory.rename(goal)
    except OSError:
        recover_retired(goal.parent)
        raise
    sync(goal.parent)
    # The parent directories may be new, too.
    sync(goal.parent.parent)
    for retired in goal.parent.glob(f"{_RETIRED}{goal.name}.*"):
        _remove(retired)


def prune(directory: Path, keep: int, protected_step: int | None = None) -> None:
    """Remove complete checkpoints except the newest `keep` (at least 1) and that of `protected_step`. Ignore errors."""
    complete = [(step, path) for step, path in steps_in(directory).items() if (path / MANIFEST).exists()]
    for path in (path for step, path in complete[:-keep] if step != protected_step):
        with suppress(OSError):
            _remove(_retire(path))


def recover_retired(directory: Path) -> None:
    """Restore the names of retired checkpoints that a killed run did not replace.

    Call this before searching for checkpoints, because a retired checkpoint may be the newest. No run may write to the
    directory at the same time.
    """
    for path, goal in recoverable_checkpoints(directory).items():
        if not goal.exists():
            path.rename(goal)
            sync(directory)


def recoverable_checkpoints(directory: Path) -> dict[Path, Path]:
    """Return the original paths of complete retired checkpoints that were not replaced, keyed by current path."""
    goals = {
        path: directory / path.name.removeprefix(_RETIRED).partition(".")[0]
        for path in sorted(directory.glob(f"{_RETIRED}*"))
        if (path / MANIFEST).exists()
    }
    return {path: goal for path, goal in goals.items() if not goal.exists()}


def remove_incomplete(directory: Path) -> None:
    """Remove unfinished and retired checkpoints that killed runs left in a directory.

    `recover_retired` first restores those that were not replaced. No run may write to the directory at the same time.
    """
    recover_retired(directory)
    for prefix in (_UNFINISHED, _RETIRED):
        for path in directory.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def _retire(path: Path) -> Path:
    retired = path.with_name(f"{_RETIRED}{path.name}.{os.getpid()}")
    path.rename(retired)
    return retired


def _remove(retired: Path) -> None:
    """Remove a retired checkpoint, starting with the manifest, so that a directory with a manifest is complete."""
    with suppress(OSError):
        (retired / MANIFEST).unlink(missing_ok=True)
        sync(retired)
        shutil.rmtree(retired)

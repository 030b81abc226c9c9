"""How the directory of a checkpoint gets its name, loses it and goes.

Note: a crash at any moment
    A checkpoint that is replaced or pruned is first retired, under a hidden name. One that is replaced is removed only
    when the new one has the name, on the disk too. Its manifest is removed first: so a retired directory with a
    manifest is whole, and `recover_retired` gives it its name back if no other has it.
"""

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from odc_mpi.checkpoint.index import write_index
from odc_mpi.checkpoint.manifest import INDEX, MANIFEST, Manifest, steps_in, write_manifest
from odc_mpi.files import sync_directory

#: Prefixes of directories that are not yet, or no longer, checkpoints.
_UNFINISHED, _RETIRED = ".step_", ".retired_"


def publish(directory: Path, manifest: Manifest, goal: Path) -> None:
    """Make a checkpoint of a directory with all ranks' files: the checkpoint appears complete or not at all.

    Args:
        directory: The directory, beside `goal`.
        manifest: The manifest with the ranks' files.
        goal: Name of the checkpoint; an older checkpoint of this name is replaced.

    Raises:
        OSError: Something cannot be written.
    """
    index = write_index(directory, manifest)
    write_manifest(directory / MANIFEST, replace(manifest, files={**manifest.files, INDEX: index}))
    sync_directory(directory)
    if goal.exists():
        _retire(goal)
    try:
        directory.rename(goal)
    except OSError:
        recover_retired(goal.parent)
        raise
    sync_directory(goal.parent)
    # The names of the directories above may be new as well.
    sync_directory(goal.parent.parent)
    for retired in goal.parent.glob(f"{_RETIRED}{goal.name}.*"):
        _remove(retired)


def prune(directory: Path, keep: int, protected_step: int | None = None) -> None:
    """Remove the oldest checkpoints until `keep` are left. Local; a checkpoint that cannot be removed stays.

    Args:
        directory: Of the checkpoints.
        keep: How many of the newest stay.
        protected_step: A step whose checkpoint stays in any case.
    """
    complete = [(step, path) for step, path in steps_in(directory).items() if (path / MANIFEST).exists()]
    for path in (path for step, path in complete[:-keep] if step != protected_step):
        with suppress(OSError):
            _remove(_retire(path))


def recover_retired(directory: Path) -> None:
    """Give retired checkpoints their names back where a killed run has not come to use the names.

    Call it before a search for checkpoints, as one of these may be the newest, and while no other run writes there.

    Raises:
        OSError: A directory cannot be renamed.
    """
    for path, goal in retired(directory).items():
        if not goal.exists():
            path.rename(goal)
            sync_directory(directory)


def retired(directory: Path) -> dict[Path, Path]:
    """Return the whole checkpoints under hidden names whose names no other has, and these names."""
    found = {
        path: directory / path.name.removeprefix(_RETIRED).partition(".")[0]
        for path in sorted(directory.glob(f"{_RETIRED}*"))
        if (path / MANIFEST).exists()
    }
    return {path: goal for path, goal in found.items() if not goal.exists()}


def clean(directory: Path) -> int:
    """Remove the incomplete checkpoints of killed runs; return their number. Local; nobody may be writing there."""
    recover_retired(directory)
    left = [path for start in (_UNFINISHED, _RETIRED) for path in directory.glob(f"{start}*")]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return len(left)


def _retire(path: Path) -> Path:
    """Take a checkpoint's name away; return its hidden name."""
    retired = path.with_name(f"{_RETIRED}{path.name}.{os.getpid()}")
    path.rename(retired)
    return retired


def _remove(retired: Path) -> None:
    """Remove a retired checkpoint; an interruption leaves nothing that looks like a checkpoint."""
    with suppress(OSError):
        (retired / MANIFEST).unlink(missing_ok=True)
        sync_directory(retired)
        shutil.rmtree(retired)

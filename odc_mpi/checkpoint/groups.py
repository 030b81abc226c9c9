"""Checkpoints of a run directory, which belong to one run or to the runs of its islands (docs/islands.md).

    RUN/checkpoints/step_S              of a run
    RUN/islands/K/checkpoints/step_S    of island K, which trained apart from the others

The metadata of an island's checkpoint has the entry `islands`: the number of islands (`size`), the `index` of this one,
the number of the last `merge` of their models, and the `members` of that merge: all islands, unless a quorum left out
some (`islands.quorum`). The checkpoints of the members after the same merge form a group. `clock` is the largest number
of steps of an island that this merge or those before it contain, so it orders groups of islands at different steps.
"""

from pathlib import Path
from typing import Any

from odc_mpi.checkpoint.manifest import CHECKPOINTS, MANIFEST, read_manifest, step_of, steps_in
from odc_mpi.errors import UserError
from odc_mpi.islands.run_dir import ISLANDS, island_directories


def checkpoint_directories(path: Path) -> list[Path]:
    """Return the directories of the checkpoints in `path`, oldest first, for each island. They may be incomplete.

    `path` is a run directory, its checkpoint directory, or a single checkpoint. Raises `UserError` if there are none.
    """
    if (path / MANIFEST).exists() or path in steps_in(path.parent).values():
        return [path]
    folders = [path, *(run_dir / CHECKPOINTS for run_dir in (path, *island_directories(path)))]
    if directories := [directory for folder in folders for directory in steps_in(folder).values()]:
        return directories
    raise UserError(f"no checkpoint in {path}: expected a run directory, its {CHECKPOINTS}/ or one checkpoint")


def checkpoint_groups(path: Path) -> list[tuple[Path, ...]]:
    """Return the groups of checkpoints in `path`, oldest first.

    A group is the directory of one checkpoint or, if islands train apart, of one checkpoint of each island that took
    part in the merge, in order. Checkpoints of islands are omitted if one is missing on another of these islands.
    A checkpoint whose metadata cannot be read is a group of its own. If `path` is a single checkpoint, returns only the
    group that contains it. For `path` and errors, see `checkpoint_directories`.
    """
    if checkpoint_directories(path) == [path]:
        others = checkpoint_groups(path.absolute().parents[3]) if _islands_of(path) else []
        return [group for group in others if path.absolute() in group] or [(path,)]
    groups: dict[object, dict[int, Path]] = {}
    sizes: dict[object, int] = {}
    clocks: dict[object, int] = {}
    for directory in checkpoint_directories(path):
        islands = _islands_of(directory)
        key = (islands["size"], islands["merge"]) if islands else directory
        groups.setdefault(key, {})[islands["index"] if islands else 0] = directory
        sizes[key] = len(islands.get("members", range(islands["size"]))) if islands else 1
        clocks[key] = max(clocks.get(key, 0), islands.get("clock", 0) if islands else 0, step_of(directory))
    complete = [key for key, group in groups.items() if len(group) == sizes[key]]
    return [tuple(groups[key][i] for i in sorted(groups[key])) for key in sorted(complete, key=lambda key: clocks[key])]


def newest_directory(path: Path) -> Path:
    """Return the newest complete checkpoint in `path`, that of the first island if there are islands.

    If none is complete, returns the newest one. For errors, see `checkpoint_directories`.
    """
    groups = checkpoint_groups(path) or [(directory,) for directory in checkpoint_directories(path)]
    complete = [group for group in groups if all((directory / MANIFEST).exists() for directory in group)]
    return (complete or groups)[-1][0]


def _islands_of(directory: Path) -> dict[str, Any] | None:
    """Return the entry `islands` of a checkpoint's metadata, or None if it is not readable or of a run without them."""
    if directory.absolute().parents[2].name != ISLANDS or not (directory / MANIFEST).exists():
        return None
    try:
        return read_manifest(directory).metadata.get("islands")
    except UserError:
        return None

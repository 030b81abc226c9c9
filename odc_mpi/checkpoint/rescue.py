"""`odc-mpi checkpoint rescue`: makes a checkpoint on disk from pieces in the memory of the nodes (`checkpoint.memory`).

It runs once on each host, at the same time or one after the other, without MPI. Each run copies intact pieces of its
host to a hidden *staging directory* next to the checkpoints, which all hosts see. The first run that finds all pieces
there renames the directory, so that no other run can use it, completes it, and publishes it as a checkpoint.
"""

import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from odc_mpi.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    FileRecord,
    add_state,
    from_json,
    read_checked,
    shard_name,
    step_name,
    steps_in,
)
from odc_mpi.checkpoint.memory import Piece, descriptions, remove
from odc_mpi.checkpoint.publish import publish
from odc_mpi.checkpoint.shard_file import ShardFile
from odc_mpi.errors import UserError, one_line_message
from odc_mpi.files import make_directory, sync

#: Suffix of staging directories. Their prefix is that of unfinished checkpoints, which the next start of a run removes.
_STAGING = ".memory"


class Rescue(NamedTuple):
    """Result of `rescue`. `step` is that of the checkpoint made from memory, or None; `message` is a line to print."""

    step: int | None
    message: str


class _Generation(NamedTuple):
    """State after `step` steps of the start `token` of a run, of which pieces may be on this host or staged."""

    token: str
    step: int


#: Pieces on this host and the paths of their descriptions, by rank. Copies for other nodes come last.
_Pieces: TypeAlias = dict[int, list[tuple[Piece, Path]]]


def rescue(run_dir: Path, memory_dir: Path) -> Rescue:
    """Make a checkpoint in `run_dir` from the newest state in memory of which all pieces are intact, and free memory.

    No process of the run may be alive. Call this on each host: pieces of this host are copied to the run directory, and
    the call that finds all pieces there makes the checkpoint. No call does if that on disk is as new or newer. Does not
    wait for other hosts. Raises `OSError`, and keeps what is in memory, if the run directory cannot be written.
    """
    checkpoints, rescued = run_dir / CHECKPOINTS, None
    generations = _find(checkpoints, memory_dir, run_dir)
    problems = [] if generations else [f"{memory_dir} has no states of this run"]
    # Those of a later start of the run come first, even if it has made fewer steps.
    for generation in sorted(generations, key=lambda each: (int(each.token, 16), each.step), reverse=True):
        if generation.step <= _newest_on_disk(checkpoints):
            problems.append(f"step {generation.step} in memory is not newer")
            break
        missing = _complete(checkpoints, generation, generations[generation])
        if not missing:
            rescued = generation.step
            break
        problems += missing
    remove(memory_dir, run_dir)
    reasons = "; ".join(problems)
    if rescued is not None:
        goal = checkpoints / step_name(rescued)
        return Rescue(rescued, f"rescued step {rescued} from memory: {goal}{reasons and f' ({reasons})'}")
    newest = _newest_on_disk(checkpoints)
    used = f"the newest checkpoint on disk, of step {newest}, is used" if newest else "there is no checkpoint on disk"
    return Rescue(None, f"no step rescued from memory, {used}: {reasons}")


def _newest_on_disk(checkpoints: Path) -> int:
    return max((step for step, path in steps_in(checkpoints).items() if (path / MANIFEST).exists()), default=0)


def _find(checkpoints: Path, memory_dir: Path, run_dir: Path) -> dict[_Generation, _Pieces]:
    """Find the generations of which this host or the run directory has pieces."""
    found: dict[_Generation, _Pieces] = {}
    for path in checkpoints.glob(f".step_*{_STAGING}"):
        _, name, token, _ = path.name.split(".")
        found[_Generation(token, int(name.removeprefix("step_")))] = {}
    for path in descriptions(memory_dir, run_dir):
        with suppress(UserError):  # it was being written
            piece = _read_piece(path)
            pieces = found.setdefault(_Generation(piece.token, piece.step), {})
            pieces.setdefault(piece.rank, []).append((piece, path))
    return found


def _read_piece(path: Path) -> Piece:
    try:
        content = read_checked(path)
        return Piece(**{name: content[name] for name in Piece._fields})
    except (ValueError, KeyError) as error:
        raise UserError(f"{path} is damaged: {one_line_message(error)}") from error


def _complete(checkpoints: Path, generation: _Generation, pieces: _Pieces) -> list[str]:
    """Stage the pieces of a generation. If it is complete, publish it and return []; else return what is wrong."""
    goal = checkpoints / step_name(generation.step)
    staging = checkpoints / f".{goal.name}.{generation.token}{_STAGING}"
    try:
        make_directory(staging)
        problems = [problem for copies in pieces.values() for problem in _stage(staging, copies)]
        staged = [_read_piece(path) for path in sorted(staging.glob("rank_*.json"))]
        missing = sorted({*range(staged[0].size if staged else 1)} - {piece.rank for piece in staged})
        if missing:
            with suppress(OSError):  # not empty
                staging.rmdir()
            of_ranks = f"of rank {', '.join(map(str, missing))}" if staged else "of all ranks"
            return [*problems, f"step {generation.step} in memory lacks the pieces {of_ranks}"]
        claimed = staging.with_name(f"{staging.name}.{secrets.token_hex(8)}")
        staging.rename(claimed)
    except FileNotFoundError:
        return []  # another host has found all pieces, and publishes them
    _publish(claimed, goal, staged)
    for path in checkpoints.glob(f".step_*{_STAGING}"):
        shutil.rmtree(path, ignore_errors=True)
    return []


def _stage(staging: Path, copies: Sequence[tuple[Piece, Path]]) -> Iterator[str]:
    """Copy the first intact copy of a piece to the staging directory, and yield the damage of those before it."""
    for piece, description in copies:
        if (staging / description.name).exists():
            return
        try:
            with ShardFile(description.with_suffix(".h5"), FileRecord(**piece.file)) as file:
                damage = next(file.verify(), None)
        except UserError as error:
            damage = str(error)
        if damage is None:
            _copy(description.with_suffix(".h5"), staging / shard_name(piece.step, piece.rank))
            _copy(description, staging / description.name)
            return
        yield damage


def _copy(source: Path, goal: Path) -> None:
    new = goal.with_name(f".{goal.name}.{secrets.token_hex(8)}")
    shutil.copyfile(source, new)
    sync(new)
    new.rename(goal)


def _publish(directory: Path, goal: Path, staged: Sequence[Piece]) -> None:
    """Publish a directory with the pieces of all ranks as the checkpoint `goal`."""
    head = staged[0].manifest
    assert head is not None, "the manifest is in the piece of rank 0"
    manifest = add_state(from_json(head), [piece.records for piece in staged])
    files = {shard_name(piece.step, piece.rank): FileRecord(**piece.file) for piece in staged}
    for path in directory.iterdir():
        if path.name not in files:
            path.unlink()
    try:
        if not (goal / MANIFEST).exists():
            publish(directory, replace(manifest, files=files), goal)
    except OSError:
        if not (goal / MANIFEST).exists():
            raise
    shutil.rmtree(directory, ignore_errors=True)  # if another host, which has copies of all pieces, was faster

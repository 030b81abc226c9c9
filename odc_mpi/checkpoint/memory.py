"""Checkpoints in the memory of the nodes, from which `checkpoint.rescue` makes one on disk after a rank has died.

    MEMORY_DIR/odc_mpi-UID-RUN-JOB/rank_00002/0/rank_00002.h5, .json    this rank's piece of one generation
                                                rank_00001.h5, .json    copy of a piece of another node
                                              1/ ...                    another generation

A *piece* is the file that a rank would write for a checkpoint on disk, and a description in JSON. The description is
deleted before the file is overwritten, and written after it, so a piece with an intact description is complete. The
generation before the last complete one is overwritten, where memory has already been allocated.

    start             after the parameters are published: start a thread that writes this rank's piece, and sends it
    report            before the all-gather of gradient statistics: return one number for this all-gather
    receive_reports   after the all-gather: if all ranks have written their pieces, the generation is complete
"""

import hashlib
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from odc_mpi.checkpoint.manifest import StateRecords, file_attributes, write_checked
from odc_mpi.checkpoint.saver import BackgroundTask, format_error
from odc_mpi.checkpoint.shard_file import ShardEntry, ShardWriter
from odc_mpi.errors import UserError

#: Generations that are kept: while one is written, the one before is complete.
GENERATIONS = 2


class Exchange(Protocol):
    """Copies files to other nodes, such as `comm.buddies.Buddies`."""

    @property
    def sources(self) -> Sequence[int]:
        """Ranks whose files arrive here."""

    def exchange(self, files: Sequence[Path | None], copies: Mapping[int, Sequence[Path]]) -> None:
        """Send files, and write those of `sources` to the paths `copies`. Raises `OSError` at the end."""


class Piece(NamedTuple):
    """Description of the piece of `rank`, one of `size` ranks, after `step` steps of the start `token` of a run.

    `file` and `manifest` are a `FileRecord` and, on rank 0, a `Manifest` as dictionaries; see `MemorySaver.start`.
    """

    token: str
    step: int
    rank: int
    size: int
    file: dict[str, int]
    records: StateRecords
    manifest: Mapping[str, Any] | None


class _Pending(NamedTuple):
    step: int
    writing: BackgroundTask[bool]


class MemorySaver:
    """Writer for this rank's pieces of the generations in memory.

    Args:
        directory: Directory of this rank, which must exist.
        token: Identifies the start of the run, the same on all ranks. Those of later starts are greater.
        buddies: Copies pieces to other nodes; None for none.
        warn: Thread-safe function that prints a line for the user.
    """

    def __init__(
        self, directory: Path, rank: int, size: int, token: str, buddies: Exchange | None, warn: Callable[[str], None]
    ) -> None:
        self._directory, self._rank, self._size, self._token = directory, rank, size, token
        self._buddies, self._warn = buddies, warn
        self._writers = []
        for number in range(GENERATIONS):
            (directory / str(number)).mkdir(mode=0o700)
            self._writers.append(ShardWriter(self._path(number, rank)))
        self._pending: _Pending | None = None
        #: Number of generations that are complete.
        self.num_saved = 0

    @property
    def pending(self) -> bool:
        """True from `start` until every rank has reported whether its piece was written. The same on all ranks."""
        return self._pending is not None

    def wait_until_written(self) -> None:
        """Wait without a time limit (see `World.deadline`) until this rank has written and sent its piece."""
        if self._pending:
            self._pending.writing.join()

    def start(
        self, step: int, entries: Sequence[ShardEntry], records: StateRecords, manifest: Mapping[str, Any] | None
    ) -> None:
        """Start a thread that writes this rank's piece of a generation. `pending` must be False.

        The arrays in `entries` must not change until the piece is written. `records` are those of this rank's state.
        `manifest` is a `Manifest` as a dictionary, with all model tensors and the metadata, but no state and no file
        records. It must be None on ranks other than 0.
        """
        assert not self.pending, "two generations at a time"
        self._pending = _Pending(step, BackgroundTask(lambda: self._write(step, entries, records, manifest)))

    def report(self) -> float:
        """Return the step of the piece that was written, negative if it failed, or 0 if there is nothing to report."""
        if self._pending is None or self._pending.writing.is_alive():
            return 0.0
        return float(self._pending.step if self._pending.writing.result else -self._pending.step)

    def receive_reports(self, reports: np.ndarray) -> None:
        """Process all ranks' reports, `[size]`. Once all have written a generation, the next overwrites the older."""
        if self._pending and (np.abs(reports) == self._pending.step).all():
            self._pending = None
            self.num_saved += bool((reports > 0).all())

    def _write(
        self, step: int, entries: Sequence[ShardEntry], records: StateRecords, manifest: Mapping[str, Any] | None
    ) -> bool:
        number = self.num_saved % GENERATIONS  # a failed generation is overwritten by the next
        path = self._path(number, self._rank)
        files: list[Path | None] = [path, path.with_suffix(".json")]
        done = True
        for old in path.parent.glob("*.json"):
            old.unlink()
        try:
            record = self._writers[number].write(entries, file_attributes(step, self._rank, self._size))
            piece = Piece(self._token, step, self._rank, self._size, asdict(record), records, manifest)
            write_checked(path.with_suffix(".json"), piece._asdict())
        except Exception as error:
            files, done = [None, None], False
            self._warn_failed(step, error)
        if self._buddies:
            copies = {source: self._path(number, source) for source in self._buddies.sources}
            try:
                self._buddies.exchange(files, {source: (x, x.with_suffix(".json")) for source, x in copies.items()})
            except OSError as error:
                done = False
                self._warn_failed(step, error)
        return done

    def _warn_failed(self, step: int, error: Exception) -> None:
        self._warn(
            f"WARNING: rank {self._rank} could not copy the state of step {step} to {self._directory}: "
            f"{format_error(error)}: free some memory, or set run.memory_dir or run.memory_every; training continues"
        )

    def _path(self, number: int, rank: int) -> Path:
        return self._directory / str(number) / f"rank_{rank:05d}.h5"


def expand(memory_dir: str) -> Path:
    """Return the directory of the setting `run.memory_dir` on this host."""
    return Path(memory_dir.replace("%h", socket.gethostname())).absolute()


def make_rank_directory(memory_dir: Path, run_dir: Path, job: str, rank: int) -> Path:
    """Create the directory for the pieces of a rank, which only this user can read, and return its path.

    Raises `UserError` if another user has created it.
    """
    parent = memory_dir / f"{_prefix(run_dir)}{job}"
    with suppress(FileExistsError):
        parent.mkdir(mode=0o700)
    if not _is_private(parent):
        raise UserError(f"run.memory_dir: {parent} belongs to another user: set run.memory_dir to another directory")
    directory = parent / f"rank_{rank:05d}"
    directory.mkdir(mode=0o700)
    return directory


def directories(memory_dir: Path, run_dir: Path) -> list[Path]:
    """Return the directories in memory, of all jobs, that belong to this user and to a run."""
    return [path for path in sorted(memory_dir.glob(f"{_prefix(run_dir)}*")) if _is_private(path)]


def descriptions(memory_dir: Path, run_dir: Path) -> Iterator[Path]:
    """Yield the paths of the descriptions of the pieces of a run, of ranks of this node first."""
    found = [path for each in directories(memory_dir, run_dir) for path in each.glob("rank_*/*/rank_*.json")]
    yield from sorted(found, key=lambda path: (path.parts[-3] != path.stem, path))


def remove(memory_dir: Path, run_dir: Path) -> None:
    """Remove all that a run has in the memory of this node. No process of the run may be alive."""
    for path in directories(memory_dir, run_dir):
        shutil.rmtree(path, ignore_errors=True)


def require_room(memory_dir: Path, run_dir: Path, num_bytes: int, num_copies: int) -> None:
    """Raise `UserError` if this node lacks room for `num_bytes` bytes, the generations of all of its ranks.

    `num_copies` is 2 if each piece has a copy on another node, otherwise 1. What an earlier start of the run has left
    counts as room.
    """
    try:
        free = shutil.disk_usage(memory_dir).free
    except OSError as error:
        raise UserError(f"run.memory_dir: expected a directory, got {memory_dir}: {error.strerror}") from error
    left = [path for each in directories(memory_dir, run_dir) for path in each.rglob("*")]
    free += sum(path.stat().st_size for path in left)
    if free < num_bytes:
        copies = ", each with a copy on another node" if num_copies > 1 else ""
        raise UserError(
            f"run.memory_dir: expected {num_bytes / 2**20:,.1f} MiB free in {memory_dir} for the {GENERATIONS} newest "
            f"states of all ranks of a node{copies}, got {free / 2**20:,.1f} MiB: enlarge it, set run.memory_dir to "
            "another directory, or remove run.memory_every"
        )


def _prefix(run_dir: Path) -> str:
    return f"odc_mpi-{os.getuid()}-{hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]}-"


def _is_private(path: Path) -> bool:
    """Return True for a directory of this user that is no symbolic link."""
    with suppress(FileNotFoundError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False

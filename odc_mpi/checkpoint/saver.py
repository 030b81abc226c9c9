"""Saving beside the training: a thread of each rank writes its file, one of rank 0's makes a checkpoint of them.

    start      after B: this rank's copy goes to its thread, which writes it; no communication from there
    report     before A: three numbers about this rank's file, which travel with the other numbers of point A
    hear       after A: once all ranks have reported a checkpoint as written, rank 0 publishes it in a thread

The files of a checkpoint are written into a hidden directory, the index and the manifest last; then the directory gets
its name. So a directory with the name is complete. A checkpoint that some rank could not write is removed, and the
training goes on.
"""

import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from odc_mpi.checkpoint.manifest import FORMAT, VERSION, FileRecord, Manifest, shard_name, step_name
from odc_mpi.checkpoint.publish import prune, publish
from odc_mpi.checkpoint.shard_file import ShardEntry, write_shard
from odc_mpi.errors import one_line_message

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """A function that runs in a daemon thread, which does not keep a program from ending; it tells its own errors.

    Attributes:
        result: Returned by the function; None until then, and if it raised.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._ended = threading.Event()
        self.result: T | None = None
        threading.Thread(target=self._run, args=(function,), name="odc_mpi-checkpoint", daemon=True).start()

    @property
    def done(self) -> bool:
        """Whether the function has returned or raised."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until the function has returned or raised."""
        while not self._ended.wait(0.1):  # so that signals are heard meanwhile
            pass

    def _run(self, function: Callable[[], T]) -> None:
        try:
            with suppress(Exception):
                self.result = function()
        finally:
            self._ended.set()


@dataclass(frozen=True)
class _PendingCheckpoint:
    """A checkpoint that not all ranks have reported as written."""

    step: int
    writing: BackgroundTask[FileRecord]
    manifest: Manifest | None
    protected_step: int | None


class Saver:
    """Writes this rank's part of checkpoints. All methods are local.

    Args:
        directory: Directory of the checkpoints, on a file system that all ranks see.
        rank: This rank.
        size: Number of ranks.
        token: Name of the run, the same on every rank and different for every run.
        keep: How many complete checkpoints to keep; 0 keeps all.
        warn: Called from any thread with a line for the user.
        check: Raises OSError where this run may not write any more; called from any thread.

    Attributes:
        num_saved: On rank 0: checkpoints that became complete.
        num_failed: On rank 0: checkpoints that did not.
        last_failed: On rank 0: whether the last checkpoint did not become complete.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        size: int,
        token: str,
        *,
        keep: int = 0,
        warn: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._rank, self._size = rank, size
        self._token = token
        self._keep = keep
        self._warn = warn
        self._check = check
        self._pending: _PendingCheckpoint | None = None
        self._publishing: BackgroundTask[None] | None = None
        self.num_saved = self.num_failed = 0
        self.last_failed = False

    @property
    def pending(self) -> bool:
        """Whether there is a checkpoint that not all ranks have reported as written; the same on every rank."""
        return self._pending is not None

    @property
    def busy(self) -> bool:
        """Whether a thread of this rank is still writing or publishing."""
        writing = self._pending is not None and not self._pending.writing.done
        return writing or (self._publishing is not None and not self._publishing.done)

    def wait_until_written(self) -> None:
        """Wait until this rank's thread has nothing left to write. Local; the caller sets the deadline."""
        if self._pending:
            self._pending.writing.wait()

    def start(
        self, step: int, entries: Sequence[ShardEntry], manifest: Manifest | None, protected_step: int | None = None
    ) -> None:
        """Write this rank's file of a checkpoint in a thread. Local; no other checkpoint may be pending or busy.

        Args:
            step: Step of the checkpoint, the same on every rank.
            entries: Content of the file; not to be changed until it is written.
            manifest: The manifest without its files, on rank 0; None elsewhere.
            protected_step: A step whose checkpoint is kept beyond the newest.
        """
        assert not self.pending and not self.busy, "two checkpoints at a time"
        self._pending = _PendingCheckpoint(
            step, BackgroundTask(lambda: self._write(step, entries)), manifest, protected_step
        )

    def report(self) -> tuple[float, float, float]:
        """Return the report for the other ranks: the step that is written, the file's bytes and checksum.

        The step is negative if the file could not be written, and 0 if there is nothing to report yet.
        """
        if self._pending is None or not self._pending.writing.done:
            return 0.0, 0.0, 0.0
        written = self._pending.writing.result
        if written is None:
            return -float(self._pending.step), 0.0, 0.0
        return float(self._pending.step), float(written.num_bytes), float(written.checksum)

    def receive_reports(self, reports: np.ndarray) -> None:
        """Take in the reports of all ranks, `[size, 3]`, the same on every rank.

        A checkpoint that all have reported is no longer pending.
        """
        steps, head = reports[:, 0], self._pending
        if head is None or not (np.abs(steps) == head.step).all():
            return
        self._pending = None
        if self._rank == 0:
            failed = np.flatnonzero(steps < 0).tolist()
            files = [FileRecord(int(num_bytes), int(checksum)) for _, num_bytes, checksum in reports]
            self._publishing = BackgroundTask(lambda: self._publish(head, files, failed))

    def wait_until_published(self) -> None:
        """Wait until rank 0's thread has nothing left to publish. Local; the caller sets the deadline."""
        if self._publishing:
            self._publishing.wait()

    def _write(self, step: int, entries: Sequence[ShardEntry]) -> FileRecord:
        attributes: dict[str, str | int] = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "rank": self._rank,
            "size": self._size,
        }
        try:
            self._check()
            directory = self._unfinished(step)
            directory.mkdir(parents=True, exist_ok=True)
            return write_shard(directory / shard_name(step, self._rank), entries, attributes)
        except Exception as error:
            self._warn(
                f"rank {self._rank} could not write its part of the checkpoint of step {step}: {_format_error(error)}"
            )
            raise

    def _publish(self, head: _PendingCheckpoint, files: list[FileRecord], failed: list[int]) -> None:
        directory = self._unfinished(head.step)
        try:
            if failed:
                raise OSError(f"rank {', '.join(map(str, failed))} could not write")
            assert head.manifest is not None
            for rank, record in enumerate(files):
                _require_visible(directory / shard_name(head.step, rank), record, rank)
            self._check()
            files_by_name = {shard_name(head.step, rank): record for rank, record in enumerate(files)}
            publish(directory, replace(head.manifest, files=files_by_name), self._directory / step_name(head.step))
        except Exception as error:
            self._warn(
                f"WARNING: there is no checkpoint of step {head.step}, {_format_error(error)}; training goes on without"
            )
            shutil.rmtree(directory, ignore_errors=True)
            self.num_failed, self.last_failed = self.num_failed + 1, True
            return
        self.num_saved, self.last_failed = self.num_saved + 1, False
        if self._keep:
            with suppress(OSError):
                self._check()
                prune(self._directory, self._keep, head.protected_step)

    def _unfinished(self, step: int) -> Path:
        return self._directory / f".{step_name(step)}.{self._token}"


def _require_visible(path: Path, record: FileRecord, rank: int) -> None:
    if not path.is_file() or path.stat().st_size != record.num_bytes:
        raise OSError(
            f"rank 0 does not see the file that rank {rank} wrote: expected run.dir on a file system that all nodes "
            f"share, got {path.parent.parent}"
        )


def _format_error(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else one_line_message(error)

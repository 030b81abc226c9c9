"""Saving checkpoints in the background. A thread on each rank writes a file; then rank 0 publishes the checkpoint.

    start             after the parameters are published: start a thread that writes a copy of this rank's state
    report            before the all-gather of gradient statistics: return three numbers for this all-gather
    receive_reports   after the all-gather: if all ranks have written their files, rank 0 starts a thread that publishes
                      the checkpoint

The files are written to a hidden directory, which is renamed last. If a rank cannot write its file, the unfinished
checkpoint is removed, and training continues. The threads do not communicate.
"""

import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from odc_mpi.checkpoint.manifest import FileRecord, Manifest, file_attributes, shard_name, step_name
from odc_mpi.checkpoint.publish import prune, publish
from odc_mpi.checkpoint.shard_file import ShardEntry, write_shard
from odc_mpi.errors import one_line_message

T = TypeVar("T")


class BackgroundTask(threading.Thread, Generic[T]):
    """Daemon thread that starts when constructed and calls `function`, which must report its own exceptions."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__(name="odc_mpi-checkpoint", daemon=True)
        #: Return value of the function, or None if it has not returned or has raised an exception.
        self.result: T | None = None
        self._function = function
        self.start()

    def run(self) -> None:
        """Call the function."""
        with suppress(Exception):
            self.result = self._function()
        del self._function  # with the objects it captured, such as the copied state


class _PendingCheckpoint(NamedTuple):
    step: int
    writing: BackgroundTask[FileRecord]
    manifest: Manifest | None
    protected_step: int | None


class Saver:
    """Writer for this rank's checkpoint files. On rank 0, it also publishes the checkpoints.

    Args:
        directory: Directory for the checkpoints, on a file system that all nodes share.
        token: Part of the hidden directories' names. Must be unique to this start of the run and the same on all ranks.
        keep: Number of most recent complete checkpoints to keep. 0 keeps all of them.
        warn: Thread-safe function that prints a line for the user.
        check: Thread-safe function that raises `OSError` if this run may no longer write to the run directory.

    Attributes:
        num_saved, num_failed: Numbers of published and of failed checkpoints. Always 0 on ranks other than 0.
        last_failed: True if the last checkpoint failed. Always False on ranks other than 0.
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
        self._directory, self._rank, self._size, self._token = directory, rank, size, token
        self._keep, self._warn, self._check = keep, warn, check
        self._pending: _PendingCheckpoint | None = None
        self._publishing: BackgroundTask[None] | None = None
        self.num_saved = self.num_failed = 0
        self.last_failed = False

    @property
    def pending(self) -> bool:
        """True from `start` until every rank has reported whether its file was written. The same on all ranks."""
        return self._pending is not None

    @property
    def busy(self) -> bool:
        """True while a thread of this rank is writing a file or publishing a checkpoint."""
        writing = self._pending is not None and self._pending.writing.is_alive()
        return writing or (self._publishing is not None and self._publishing.is_alive())

    def wait_until_written(self) -> None:
        """Wait without a time limit (see `World.deadline`) until writing this rank's file has succeeded or failed."""
        if self._pending:
            self._pending.writing.join()

    def start(
        self, step: int, entries: Sequence[ShardEntry], manifest: Manifest | None, protected_step: int | None = None
    ) -> None:
        """Start a thread that writes this rank's file of a checkpoint. `pending` and `busy` must be False.

        The arrays in `entries` must not change until the file is written. `manifest` must contain no file records, and
        must be None on ranks other than 0. The checkpoint of `protected_step` is kept in addition to the newest ones.
        """
        assert not self.pending and not self.busy, "two checkpoints at a time"
        writing = BackgroundTask(lambda: self._write(step, entries))
        self._pending = _PendingCheckpoint(step, writing, manifest, protected_step)

    def report(self) -> tuple[float, float, float]:
        """Return this rank's report for `receive_reports`: checkpoint step, file size in bytes, and file checksum.

        The step is negative if the file could not be written, and 0 while there is nothing to report.
        """
        if self._pending is None or self._pending.writing.is_alive():
            return 0.0, 0.0, 0.0
        written = self._pending.writing.result
        if written is None:
            return -float(self._pending.step), 0.0, 0.0
        return float(self._pending.step), float(written.num_bytes), float(written.checksum)

    def receive_reports(self, reports: np.ndarray) -> None:
        """Process all ranks' reports, float64 `[size, 3]`. Once all files are written, rank 0 starts to publish them.

        If a rank could not write its file, rank 0 removes the unfinished checkpoint and prints a warning instead.
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
        """On rank 0, wait without a time limit (see `World.deadline`) until publishing has succeeded or failed."""
        if self._publishing:
            self._publishing.join()

    def _write(self, step: int, entries: Sequence[ShardEntry]) -> FileRecord:
        try:
            self._check()
            directory = self._unfinished(step)
            directory.mkdir(parents=True, exist_ok=True)
            attributes = file_attributes(step, self._rank, self._size)
            return write_shard(directory / shard_name(step, self._rank), entries, attributes)
        except Exception as error:
            self._warn(
                f"rank {self._rank} could not write its part of the checkpoint of step {step}: {format_error(error)}"
            )
            raise

    def _publish(self, head: _PendingCheckpoint, files: list[FileRecord], failed: list[int]) -> None:
        directory = self._unfinished(head.step)
        try:
            if failed:
                raise OSError(f"rank {', '.join(map(str, failed))} could not write")
            assert head.manifest is not None
            files_by_name = {shard_name(head.step, rank): record for rank, record in enumerate(files)}
            for rank, (name, record) in enumerate(files_by_name.items()):
                path = directory / name
                if not path.is_file() or path.stat().st_size != record.num_bytes:
                    raise OSError(
                        f"rank 0 does not see the file that rank {rank} wrote: expected run.dir on a file system that "
                        f"all nodes share, got {self._directory}"
                    )
            self._check()
            publish(directory, replace(head.manifest, files=files_by_name), self._directory / step_name(head.step))
        except Exception as error:
            self._warn(f"WARNING: checkpoint of step {head.step} not saved: {format_error(error)}; training continues")
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


def format_error(error: Exception) -> str:
    """Return the reason of an error in one line, without the path of an `OSError`."""
    return error.strerror if isinstance(error, OSError) and error.strerror else one_line_message(error)

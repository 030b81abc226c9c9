"""A log file per rank for library warnings, which would otherwise interrupt the metrics on the terminal.

Python warnings, and log records of libraries at level WARNING or above, are written to one file per rank in the
directory `run.log_dir`, or dropped if it is not set. A message that a logger repeats is written once. Rank 0 also
prints records at level ERROR or above, one line each. Warnings of odc_mpi are printed by `errors.warn` and not logged.
"""

import logging
import os
import sys
from collections.abc import Callable
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from odc_mpi.errors import UserError
from odc_mpi.runtime.job_info import slurm_job

if TYPE_CHECKING:
    from odc_mpi.runtime.world import World

#: Loggers of libraries that install their own printing handlers.
_SEPARATE_LOGGERS = ("transformers",)


class RankLog:
    """Context manager that redirects Python warnings and log records to a file. Rank 0 also prints errors.

    Enter the context before importing large libraries, because imports can cause warnings. Records are kept in memory
    until `open` is called, or dropped if the context ends before that.
    """

    def __init__(self, rank: int) -> None:
        # Without a target and with this flush level, the handler keeps all records.
        self._buffer = MemoryHandler(capacity=0, flushLevel=logging.CRITICAL + 1)
        self._buffer.setLevel(logging.WARNING)
        self._handlers: list[logging.Handler] = [self._buffer, *([_terminal()] if rank == 0 else [])]
        self._previous: list[tuple[logging.Logger, list[logging.Handler], bool]] = []

    def open(self, directory: str | None, world: "World") -> None:
        """Write the records kept in memory, and all later records, to this rank's file in `directory`.

        If `directory` is None, the records are dropped. Raises `UserError` if the file cannot be written.
        """
        handler = _file(Path(directory), world) if directory is not None else logging.NullHandler()
        self._buffer.setTarget(handler)
        self._buffer.close()  # flushes the kept records to the target
        self._handlers[0] = handler
        self._direct()

    def __enter__(self) -> "RankLog":
        self._previous = [
            (logger, logger.handlers, logger.propagate) for logger in map(logging.getLogger, (None, *_SEPARATE_LOGGERS))
        ]
        self._direct()
        logging.captureWarnings(True)
        return self

    def __exit__(self, *_: object) -> None:
        logging.captureWarnings(False)
        for logger, handlers, propagate in self._previous:
            logger.handlers, logger.propagate = handlers, propagate
        for handler in self._handlers:
            handler.close()

    def _direct(self) -> None:
        """Send records to the handlers. Call this again after transformers is imported: it installs its own."""
        for logger, *_ in self._previous:
            logger.handlers, logger.propagate = list(self._handlers) if logger is logging.root else [], True


def _header(world: "World") -> str:
    fields = {
        "rank": f"{world.rank} of {world.size}",
        "host": f"{world.hosts[world.rank]}, node {world.node} of {world.num_nodes}",
        "local rank": f"{world.local_rank} of {world.local_size}",
        "cores": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "process": f"{os.getpid()}: {' '.join(sys.argv)}",
        "MPI library": world.mpi_library,
        **{name.replace("slurm_", "Slurm ").replace("_", " "): str(value) for name, value in slurm_job().items()},
    }
    return "\n".join(f"{name}: {value}" for name, value in fields.items())


def _once() -> Callable[[logging.LogRecord], bool]:
    """Return a filter that drops a message if the same logger has logged it before."""
    seen: set[tuple[str, str]] = set()

    def is_new(record: logging.LogRecord) -> bool:
        num_seen = len(seen)
        seen.add((record.name, record.getMessage()))
        return len(seen) > num_seen

    return is_new


class _OneLine(logging.Formatter):
    """Formatter that writes a record as one line, `library: text`, without a traceback."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.name.partition('.')[0]}: {' '.join(record.getMessage().split())}"


def _terminal() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.ERROR)
    handler.setFormatter(_OneLine())
    return handler


def _file(directory: Path, world: "World") -> logging.Handler:
    # Imported late: its imports are large and may warn.
    from odc_mpi.files import make_directory

    try:
        make_directory(directory)
        path = directory / f"rank-{world.rank:0{len(str(world.size - 1))}}.log"
        with path.open("a", encoding="utf-8") as file:
            file.write(f"== {_header(world)}\n")
        handler = logging.FileHandler(path, mode="a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"run.log_dir: expected a directory to write in, got {directory}: {error.strerror}") from error
    handler.setLevel(logging.WARNING)
    handler.addFilter(_once())
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    return handler

"""One voice on the terminal, and a small file for each rank. Local.

What libraries warn of they warn of on every rank. On the terminal rank 0 speaks for all; the others' warnings go to the
files of run.log_dir, one per rank, which begin with who and where the rank is. Errors are told by who meets them.
"""

import logging
import os
import sys
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING

from odc_mpi.errors import UserError
from odc_mpi.runtime.allocation import slurm_job

if TYPE_CHECKING:
    from odc_mpi.runtime.world import World

#: Loggers that print what they are told themselves, besides passing it on or not.
_APART = ("transformers",)


class RankLog:
    """Where warnings go, while it is a context: from before large libraries are imported, which warn of things, too.

    Args:
        rank: Of this process, as its launcher tells it. Ranks other than 0 keep what they are told until `open`.
    """

    def __init__(self, rank: int) -> None:
        # Without a target and without a limit: it keeps all.
        self._kept = MemoryHandler(capacity=0, flushLevel=logging.CRITICAL + 1)
        self._kept.setLevel(logging.WARNING)
        self._handlers: list[logging.Handler] = [self._kept, *([_terminal()] if rank == 0 else [])]
        self._before: list[tuple[logging.Logger, list[logging.Handler], bool]] = []

    def open(self, directory: str | None, world: "World") -> None:
        """Write what was kept, and all that comes, into this rank's file. Local.

        Args:
            directory: For the files; None: no files.
            world: The ranks.

        Raises:
            UserError: The directory cannot be written.
        """
        handler = _file(Path(directory), world) if directory is not None else logging.NullHandler()
        self._kept.setTarget(handler)
        self._kept.close()  # which hands over what it has
        self._handlers[0] = handler
        self._direct()

    def __enter__(self) -> "RankLog":
        self._before = [
            (logger, logger.handlers, logger.propagate) for logger in map(logging.getLogger, (None, *_APART))
        ]
        self._direct()
        logging.captureWarnings(True)
        return self

    def __exit__(self, *_: object) -> None:
        logging.captureWarnings(False)
        for logger, handlers, propagate in self._before:
            logger.handlers, logger.propagate = handlers, propagate
        for handler in self._handlers:
            handler.close()

    def _direct(self) -> None:
        """Lead all loggers here; those that print themselves are set up by the import of their library. Local."""
        for logger, *_ in self._before:
            logger.handlers, logger.propagate = list(self._handlers) if logger is logging.root else [], True


def introduction(world: "World") -> str:
    """Return who and where this rank is, as its file begins. Local."""
    cores = sorted(os.sched_getaffinity(0))
    facts = {
        "rank": f"{world.rank} of {world.size}",
        "host": f"{world.hosts[world.rank]}, node {world.node} of {world.num_nodes}",
        "local rank": f"{world.local_rank} of {world.local_size}",
        "cores": ",".join(map(str, cores)),
        "process": f"{os.getpid()}: {' '.join(sys.argv)}",
        "MPI library": world.mpi_library,
        **{name.replace("slurm_", "Slurm ").replace("_", " "): str(value) for name, value in slurm_job().items()},
    }
    return "\n".join(f"{name}: {value}" for name, value in facts.items())


def _terminal() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    return handler


def _file(directory: Path, world: "World") -> logging.Handler:
    # Not before here: what this imports is large, and may warn.
    from odc_mpi.files import make_directory

    try:
        make_directory(directory)
        path = directory / f"rank-{world.rank:0{len(str(world.size - 1))}}.log"
        with path.open("a", encoding="utf-8") as file:
            file.write(f"== {introduction(world)}\n")
        handler = logging.FileHandler(path, mode="a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"run.log_dir: expected a directory to write in, got {directory}: {error.strerror}") from error
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    return handler

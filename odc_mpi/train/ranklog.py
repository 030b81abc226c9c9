"""One voice on the terminal, and a small file for each rank. Local.

What libraries warn of they warn of on every rank. On the terminal rank 0 speaks for all; the others' warnings go to the
files of run.log_dir, one per rank, which begin with who and where the rank is. Errors are told by who meets them.
"""

import logging
import os
import sys
from pathlib import Path

from odc_mpi.comm.world import World
from odc_mpi.errors import UserError
from odc_mpi.train.place import slurm_job

#: Loggers that print what they are told themselves, besides passing it on or not.
_APART = ("transformers",)


class RankLog:
    """Where warnings go, while it is a context.

    Args:
        directory: For the files; None: no files.
        world: The ranks.

    Raises:
        UserError: The directory cannot be written.
    """

    def __init__(self, directory: str | None, world: World) -> None:
        self._handlers: list[logging.Handler] = [logging.NullHandler()]  # without any, the last resort would print
        if world.rank == 0:
            self._handlers.append(_terminal())
        if directory is not None:
            self._handlers.append(_file(Path(directory), world))
        self._before: list[tuple[logging.Logger, list[logging.Handler], bool]] = []

    def __enter__(self) -> "RankLog":
        for name in (None, *_APART):
            logger = logging.getLogger(name)
            self._before.append((logger, logger.handlers, logger.propagate))
            logger.handlers, logger.propagate = [] if name else list(self._handlers), True
        logging.captureWarnings(True)
        return self

    def __exit__(self, *_: object) -> None:
        logging.captureWarnings(False)
        for logger, handlers, propagate in self._before:
            logger.handlers, logger.propagate = handlers, propagate
        for handler in self._handlers:
            handler.close()


def introduction(world: World) -> str:
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


def _file(directory: Path, world: World) -> logging.Handler:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"rank-{world.rank:0{len(str(world.size - 1))}}.log"
        with path.open("a", encoding="utf-8") as file:
            file.write(f"== {introduction(world)}\n")
        handler = logging.FileHandler(path, mode="a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"run.log_dir: expected a directory to write in, got {directory}: {error.strerror}") from error
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    return handler

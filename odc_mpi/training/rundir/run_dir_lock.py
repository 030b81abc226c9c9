"""Lock on a run directory, held by rank 0, and the check that all ranks see the directory.

Two runs in one directory would replace and delete each other's checkpoints. On one host, the second run fails to start,
because each run binds an abstract socket named after the directory (unix(7)), which the kernel frees when the run ends
or is killed. (File locks can hang on network file systems.) On another host, the second run warns and replaces
owner.json, where the first run finds the second and stops saving.
"""

import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odc_mpi.errors import AllRanksUserError, UserError, warn
from odc_mpi.files import make_directory, parse_json, write_text_durable
from odc_mpi.runtime.job_info import slurm_job

if TYPE_CHECKING:
    from odc_mpi.runtime.world import World

LOCK_FILE = "owner.json"
#: End of the name of the socket of a supervisor.
_SUPERVISOR = "-supervisor"
#: Maximum time to wait for the lock, in seconds. A killed run may still be exiting when the next one starts.
LOCK_TIMEOUT_S = 5.0
SEARCH_S = 5.0  # for ranks on other hosts: a network file system may show a new file late


class RunDirectoryLock(AbstractContextManager["RunDirectoryLock"]):
    """Lock on a run directory, used only on rank 0. Construction acquires the lock; leaving the context releases it.

    The constructor waits at most `LOCK_TIMEOUT_S` seconds, or `timeout_s / 2` if that is less, because the other ranks
    give up after `timeout_s`. Raises `UserError` if another run on this host holds the lock, or if the directory cannot
    be written to. `step` is the step at which a run begins, for `odc_mpi.supervisor`, or -1 if no run begins.
    """

    def __init__(self, run_dir: Path, timeout_s: float, step: int = -1) -> None:
        self._path, host = run_dir / LOCK_FILE, socket.gethostname()
        self._record = {"host": host, "pid": os.getpid(), "time_ns": time.time_ns(), "step": step, **slurm_job()}
        with convert_write_errors(run_dir), ExitStack() as stack:
            make_directory(run_dir)
            wait_until_free(run_dir, timeout_s / 2)
            other = read_owner(run_dir)
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(_socket_name(run_dir))
            is_requeued = other.get("slurm_job_id", "") == self._record.get("slurm_job_id")
            if other.get("host", host) != host and not is_requeued:
                warn(
                    f"WARNING: {run_dir} is marked as in use by {_describe_run(other)} that did not exit cleanly. This "
                    "run takes over; if the other is still running, it will no longer save"
                )
            write_text_durable(self._path, json.dumps(self._record) + "\n")
            self._socket = stack.pop_all()

    def require_held(self) -> None:
        """Raise `OSError` if another run has taken over the directory or the lock file is missing. Thread-safe."""
        if read_owner(self._path.parent) != self._record:
            raise OSError(
                f"another run has taken over {self._path.parent}: end one of them, or give it another run.dir"
            )

    def __exit__(self, *_: object) -> None:
        with self._socket, suppress(OSError):
            self.require_held()
            self._path.unlink()


def wait_until_free(run_dir: Path, patience_s: float = LOCK_TIMEOUT_S) -> None:
    """Wait until no run on this host holds the lock, for at most `LOCK_TIMEOUT_S`. Raise `UserError` if one does."""
    ends = time.monotonic() + min(LOCK_TIMEOUT_S, patience_s)
    while _is_bound(run_dir):
        if time.monotonic() > ends:
            raise UserError(
                f"run.dir: {run_dir} is in use by {_describe_run(read_owner(run_dir))}: choose another run.dir, "
                "or end that run"
            )
        time.sleep(0.1)


def is_held(run_dir: Path) -> bool:
    """Return True if a run, or its supervisor between two starts, holds the lock on a directory.

    A run on another host still holds it after being killed.
    """
    other_host = read_owner(run_dir).get("host", socket.gethostname()) != socket.gethostname()
    return other_host or _is_bound(run_dir) or _is_bound(run_dir, _SUPERVISOR)


def lock_supervised(run_dir: Path) -> socket.socket:
    """Create a run directory, and return a lock on it against other supervisors on this host, to be closed.

    Raises `UserError` if another supervisor holds it, or if the directory cannot be created.
    """
    with convert_write_errors(run_dir):
        make_directory(run_dir)
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        lock.bind(_socket_name(run_dir, _SUPERVISOR))
    except OSError:
        lock.close()
        message = f"run.dir: {run_dir} is in use by another odc-mpi run: choose another run.dir, or end that command"
        raise UserError(message) from None
    return lock


def read_owner(run_dir: Path) -> dict[str, Any]:
    """Return the record of the run that holds the lock, or that was killed while it did, else {}."""
    with suppress(FileNotFoundError, ValueError):
        if isinstance(record := parse_json((run_dir / LOCK_FILE).read_text("utf-8", errors="replace")), dict):
            return record
    return {}


def require_shared(run_dir: Path, world: "World") -> None:
    """Raise `AllRanksUserError` unless all ranks see the same run directory. Collective.

    Rank 0 creates a temporary file there, or in the nearest parent that exists, and the other ranks look for this file
    at the same path. If rank 0 cannot create it, nothing is checked here: opening the run reports the reason.
    """
    folders, is_remote = (run_dir, *run_dir.parents), world.hosts[world.rank] != world.hosts[0]
    with ExitStack() as stack:
        place = None
        if world.rank == 0:
            with suppress(OSError):
                depth = next(i for i, folder in enumerate(folders) if folder.exists())
                file = stack.enter_context(tempfile.NamedTemporaryFile(dir=folders[depth], prefix=".odc-mpi-"))
                place = depth, Path(file.name).name
        if (place := world.gather_objects(place)[0]) is None:
            return
        path = folders[place[0]] / place[1]
        ends = time.monotonic() + (min(SEARCH_S, world.timeout_s / 2) if is_remote else 0)
        while not (is_visible := os.access(path, os.F_OK)) and time.monotonic() < ends:
            time.sleep(0.1)
        seen = world.gather_objects((is_visible, path.parent.absolute()))
    if blind := [rank for rank, (is_visible, _) in enumerate(seen) if not is_visible]:
        more = f" and {len(blind) - 1} more" if len(blind) > 1 else ""
        raise AllRanksUserError(
            f"run.dir: expected a directory that all ranks share, got {run_dir}: a file that rank 0 on "
            f"{world.hosts[0]} wrote to {seen[0][1]} does not appear in {seen[blind[0]][1]} for rank {blind[0]} on "
            f"{world.hosts[blind[0]]}{more}: set run.dir to an absolute path on a file system that all nodes share"
        )


@contextmanager
def convert_write_errors(run_dir: Path) -> Iterator[None]:
    """Context manager that converts an `OSError` to a `UserError` about the setting `run.dir`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"run.dir: expected a directory to write in, got {run_dir}: {error.strerror}") from error


def _is_bound(run_dir: Path, role: str = "") -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        return sock.connect_ex(_socket_name(run_dir, role)) == 0


def _socket_name(run_dir: Path, role: str = "") -> str:
    directory = run_dir.stat()
    return f"\0odc_mpi-{directory.st_dev:x}-{directory.st_ino:x}{role}"


def _describe_run(other: Mapping[str, Any]) -> str:
    job = f", Slurm job {other['slurm_job_id']}" if "slurm_job_id" in other else ""
    return f"another run (process {other.get('pid')} on {other.get('host')}{job})"

"""Which run writes in a run directory: owner.json, there while the run goes. Local; for rank 0.

Two runs in one directory would replace and prune each other's checkpoints. The second is refused where the first is
known to be alive, which can be told on the same host only; elsewhere it warns and takes over, and the first one, whose
file it no longer is, stops saving. A file that a killed run left is of a process that is gone, or of this very job of
Slurm's, put into the queue again.

Of runs that start at the same moment one alone gets there: each writes a file of its own, and then links it to the
name. A file that is to go is first renamed, so that no start removes another's that has come in between.
"""

import errno
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from odc_mpi.errors import UserError, warn
from odc_mpi.files import make_directory, replace_text
from odc_mpi.runtime.allocation import slurm_job

NAME = "owner.json"
#: A run that was killed may be a moment in dying when the next one starts.
PATIENCE_S = 5.0


class Owner(AbstractContextManager["Owner"]):
    """This run as the one that writes in a directory; leaving the context gives the directory back.

    Args:
        run_dir: Made if it does not exist.
        patience_s: How long to wait for a run on this host that is about to end.

    Raises:
        UserError: Another run on this host writes there.
        OSError: The directory cannot be written.
    """

    def __init__(self, run_dir: Path, patience_s: float) -> None:
        self._path = run_dir / NAME
        pid = os.getpid()
        self._record: dict[str, Any] = {
            "token": f"{time.time_ns():x}-{pid}",
            "host": socket.gethostname(),
            "pid": pid,
            "started": _start_of(pid),
            **slurm_job(),
        }
        make_directory(run_dir)
        own = self._path.with_name(f".{NAME}.{self._record['token']}")
        try:
            replace_text(own, json.dumps(self._record) + "\n")
            self._take(own, patience_s)
        finally:
            own.unlink(missing_ok=True)

    def require(self) -> None:
        """Check that the directory is still this run's. Local; any thread may.

        Raises:
            OSError: It is another's, or the file is gone.
        """
        if self._read(self._path).get("token") != self._record["token"]:
            raise OSError(
                f"another run has taken over {self._path.parent}: end one of them, or give it another run.dir"
            )

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.require()
            self._path.unlink()

    def _take(self, own: Path, patience_s: float) -> None:
        """Give this run's file the owner file's name, once no other run has it."""
        ends = time.monotonic() + patience_s
        while not self._linked(own):
            other = self._read(self._path)
            if self._is_over(other):
                self._remove(other, own)
            elif time.monotonic() > ends:
                raise UserError(
                    f"run.dir: expected a directory in which no other run writes, got {self._path.parent}, where "
                    f"{_name(other)} does: choose another run.dir, or end that run"
                )
            else:
                time.sleep(0.1)

    def _linked(self, own: Path) -> bool:
        """Return whether this run's file has the name; of runs that start at once one alone gets there."""
        try:
            _link(own, self._path)
        except FileExistsError:
            # Also where the answer of a file server was lost, and the kernel asked once more.
            return self._read(self._path).get("token") == self._record["token"]
        return True

    def _is_over(self, other: Mapping[str, Any]) -> bool:
        """Return whether the run that wrote this can be taken for one that ended; warn where it may go on."""
        if other.get("host") == self._record["host"]:
            return other.get("pid") == self._record["pid"] or not _is_alive(other)
        if other and other.get("slurm_job_id", "") != self._record.get("slurm_job_id"):
            warn(
                f"WARNING: {self._path.parent} was last written by {_name(other)}, which has not ended in good "
                "order: if it is still running, end it, or choose another run.dir; from now on it will not save"
            )
        return True

    def _remove(self, other: Mapping[str, Any], own: Path) -> None:
        """Remove the file of a run that is over, unless another start has done so and has put its own there."""
        aside = own.with_name(f"{own.name}.old")
        with suppress(FileNotFoundError):
            self._path.rename(aside)
            if self._read(aside) != other:
                with suppress(FileExistsError):
                    _link(aside, self._path)
            aside.unlink(missing_ok=True)

    @staticmethod
    def _read(path: Path) -> dict[str, Any]:
        """Return the content of a file; nothing if there is no file, or no sense in it."""
        try:
            record = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        except (FileNotFoundError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}


def take(run_dir: Path, timeout_s: float) -> Owner:
    """Make this run the one that writes in a directory. Local; other ranks wait meanwhile, at most `timeout_s`.

    Raises:
        UserError: Another run on this host writes there, or the directory cannot be written.
    """
    with writing_in(run_dir):
        return Owner(run_dir, min(PATIENCE_S, timeout_s / 2))


@contextmanager
def writing_in(run_dir: Path) -> Iterator[None]:
    """Turn an error of the file system in the enclosed code into one about a run directory. Local.

    Raises:
        UserError: The directory cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"run.dir: expected a directory to write in, got {run_dir}: {error.strerror}") from error


def _link(source: Path, goal: Path) -> None:
    """Give a file a name that no file has: atomically, on network file systems too, so that one of two succeeds."""
    try:
        os.link(source, goal)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        # A file system without hard links, on which two that start within microseconds both succeed.
        if goal.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
        source.rename(goal)


def _name(other: Mapping[str, Any]) -> str:
    job = f", Slurm job {other['slurm_job_id']}" if "slurm_job_id" in other else ""
    return f"another run (process {other.get('pid')} on {other.get('host')}{job})"


def _is_alive(other: Mapping[str, Any]) -> bool:
    """Return whether a process of this host is there, and is the one that wrote this: numbers are used again."""
    started = _start_of(other.get("pid"))
    return started is not None and started == other.get("started")


def _start_of(pid: object) -> str | None:
    """Return the start of a process, in the kernel's ticks since this boot; None for no process, or a zombie."""
    try:
        fields = Path(f"/proc/{int(str(pid))}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        state, started = fields.split()[0], fields.split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except (OSError, ValueError, IndexError):
        return None
    return None if state in "ZX" else f"{boot}/{started}"

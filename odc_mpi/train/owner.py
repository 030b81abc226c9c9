"""Which run writes in a run directory: owner.json, there while the run goes. Local; for rank 0.

Two runs in one directory would replace and prune each other's checkpoints. The second is refused where the first is
known to be alive, which can be told on the same host only; elsewhere it warns and takes over, and the first one, whose
file it no longer is, stops saving. A file that a killed run left is of a process that is gone, or of this very job of
Slurm's, put into the queue again.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
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
        self._require_free(patience_s)
        replace_text(self._path, json.dumps(self._record) + "\n")

    def require(self) -> None:
        """Check that the directory is still this run's. Local; any thread may.

        Raises:
            OSError: It is another's, or the file is gone.
        """
        if self._read().get("token") != self._record["token"]:
            raise OSError(
                f"another run has taken over {self._path.parent}: end one of them, or give it another run.dir"
            )

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.require()
            self._path.unlink()

    def _require_free(self, patience_s: float) -> None:
        other = self._read()
        is_here = other.get("host") == self._record["host"]
        if not other or (is_here and other.get("pid") == self._record["pid"]):
            return  # nobody, or this very process before
        if not is_here:
            if other.get("slurm_job_id") is None or other.get("slurm_job_id") != self._record.get("slurm_job_id"):
                warn(
                    f"WARNING: {self._path.parent} was last written by {_name(other)}, which has not ended in good "
                    "order: if it is still running, end it, or choose another run.dir; from now on it will not save"
                )
            return
        ends = time.monotonic() + patience_s
        while _is_alive(other):
            if time.monotonic() > ends:
                raise UserError(
                    f"run.dir: expected a directory in which no other run writes, got {self._path.parent}, where "
                    f"{_name(other)} does: choose another run.dir, or end that run"
                )
            time.sleep(0.1)

    def _read(self) -> dict[str, Any]:
        """Return the content of the file; nothing if there is no file, or no sense in it."""
        try:
            record = json.loads(self._path.read_text(encoding="utf-8", errors="replace"))
        except (FileNotFoundError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}


def take(run_dir: Path, timeout_s: float) -> Owner:
    """Make this run the one that writes in a directory. Local; other ranks wait meanwhile, at most `timeout_s`.

    Raises:
        UserError: Another run on this host writes there, or the directory cannot be written.
    """
    try:
        return Owner(run_dir, min(PATIENCE_S, timeout_s / 2))
    except OSError as error:
        raise UserError(f"run.dir: expected a directory to write in, got {run_dir}: {error.strerror}") from error


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

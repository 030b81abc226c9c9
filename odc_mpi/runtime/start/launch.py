"""Child processes that act as ranks of the job in place of their parents, which survive if a child crashes.

    parent   `run_in_child` starts the child and receives its messages. The parent never starts MPI
    child    `child_main` runs the main function of the child. On rank 0, the child sends messages to its parent through
             a pipe, as one JSON object per line. The key `operation` names the next operation, and is null at the end

Launchers end all ranks when one of their processes dies; MPICH's launcher sends SIGKILL. Therefore, a parent

- keeps running after its child has crashed until rank 0 has printed the result,
- does not forward the child's requests to abort the job (it can stop them under PMI, but not under PMIx),
- reports the crash to the parent of rank 0 through a socket if both are on the same node.
"""

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from odc_mpi.errors import UserError
from odc_mpi.runtime.start.pmi import PmiRelay

#: Environment variables that contain the rank of a process under PMI (MPICH, Slurm) and PMIx (Open MPI).
_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
#: Environment variable that contains the index of a Slurm task. Slurm also sets it for tasks that do not use MPI.
_TASK_VARIABLE = "SLURM_PROCID"
#: Seconds between checks of the child. Open MPI's launcher sends SIGKILL 0.25 s after SIGTERM.
_POLL_S = 0.03
#: Seconds to wait, after a crash is reported, for messages about the failed operation.
_LAST_MESSAGES_S = 0.1
#: Seconds for which a parent keeps running after its child has crashed if it cannot see whether rank 0 still needs it.
_STAY_S = 20.0
#: Seconds that the other children have to end after the child of rank 0 has ended.
_END_S = 2.0
_PR_SET_PDEATHSIG = 1

#: Value of `ChildResult.failure` if the launcher sends SIGTERM.
ENDED_BY_LAUNCHER = "ended by the launcher"
ChildMessage = Mapping[str, Any]


def is_launched() -> bool:
    """Return True if an MPI launcher started this process. Does not initialize MPI."""
    return any(variable in os.environ for variable in _RANK_VARIABLES)


def launched_rank() -> int:
    """Return the rank under an MPI launcher, else the index of the Slurm task, else 0. Does not initialize MPI."""
    variables = _RANK_VARIABLES if is_launched() else (_TASK_VARIABLE,)
    ranks = (os.environ.get(variable, "0") for variable in variables)
    return next((int(rank) for rank in ranks if rank.isdecimal() and rank != "0"), 0)


@dataclass(frozen=True)
class ChildResult:
    """Result of a child process.

    Attributes:
        message: Last message from the child, or an empty dictionary if it sent none.
        failure: Description of the failure, such as "crashed (SIGSEGV on rank 1)", "no answer within 12 s" or
            `ENDED_BY_LAUNCHER`, or None if the child did not fail.
        output_tail: Last lines that a failed child wrote to standard output and standard error.
    """

    message: ChildMessage
    failure: str | None = None
    output_tail: str = ""


def child_main(main: Callable[[Callable[[ChildMessage], None]], None]) -> None:
    """Run the main function of a child process that `run_in_child` started.

    An exception ends only this process: under some launchers, MPI_Abort would also end the parents, and the parent of
    rank 0 still has to print the result. The argument passed to `main` is a function that sends a message to the
    parent of rank 0, and that does nothing on other ranks.
    """
    try:
        with os.fdopen(int(sys.argv[-1]), "w") as out:

            def send(message: ChildMessage) -> None:
                if launched_rank() == 0:
                    out.write(json.dumps(message) + "\n")
                    out.flush()

            main(send)
    except Exception as error:
        traceback.print_exception(error, limit=0 if isinstance(error, UserError) else None)
        sys.stderr.flush()
        os._exit(1)


@contextmanager
def run_in_child(command: Sequence[str], rank: int, deadline_s: float, quiet_s: float) -> Iterator[ChildResult]:
    """Context manager that runs a child process as a rank of the job in place of this process. Main thread only.

    On rank 0, yields the child's result as soon as it is known. On other ranks, yields an empty result once rank 0 no
    longer needs this process. At the end of the block, the child is killed, which may end the job.

    Args:
        command: Command that starts the child. The file descriptor for messages is appended as its last argument.
        rank: Rank of this process (`launched_rank`).
        deadline_s: Time in seconds after which a child is considered to have failed.
        quiet_s: Time in seconds without a new message after which the child of rank 0 is considered to have failed.
    """
    ended = threading.Event()  # by the launcher
    previous = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    reports = _CrashReports(rank)
    child = _Child(command, rank)
    try:
        if rank == 0:
            yield _wait_for_result(child, reports, ended, deadline_s, quiet_s)
        else:
            _wait_until_not_needed(child, reports, ended, deadline_s + _END_S)
            yield ChildResult({})
    finally:
        child.end()
        reports.close()
        signal.signal(signal.SIGTERM, previous)


def _wait_for_result(
    child: "_Child", reports: "_CrashReports", ended: threading.Event, deadline_s: float, quiet_s: float
) -> ChildResult:
    deadline, last = time.monotonic() + deadline_s, child.message
    quiet_until = deadline
    while True:
        child.listen(_POLL_S)
        if child.message is not last:
            last, quiet_until = child.message, time.monotonic() + quiet_s
        crash = child.crash() or reports.read()
        if crash is not None:
            child.listen(_LAST_MESSAGES_S)
            return ChildResult(child.message, *crash)
        if child.is_done():
            return ChildResult(child.message)
        if ended.is_set():
            return ChildResult(child.message, ENDED_BY_LAUNCHER, child.output_tail())
        if time.monotonic() > min(deadline, quiet_until):
            limit_s = quiet_s if quiet_until < deadline else deadline_s
            return ChildResult(child.message, f"no answer within {limit_s:g} s", child.output_tail())


def _wait_until_not_needed(
    child: "_Child", reports: "_CrashReports", ended: threading.Event, deadline_s: float
) -> None:
    deadline = time.monotonic() + deadline_s
    crash, was_open = None, False
    while not ended.is_set() and time.monotonic() < deadline:
        child.listen(_POLL_S)
        if crash is None and (crash := child.crash()):
            reports.write(*crash)
            deadline = min(deadline, time.monotonic() + _STAY_S)
        elif crash is None and child.is_done():
            break
        is_open = reports.is_open()
        if was_open and not is_open:
            # Rank 0 has printed the result. Without a failure, the child of this rank is about to end, too.
            deadline = min(deadline, time.monotonic() + (0.0 if crash else _END_S))
        was_open = was_open or is_open


class _Child:
    """Child process that inherits the environment and the launcher connection of this process."""

    def __init__(self, command: Sequence[str], rank: int) -> None:
        self._rank = rank
        self.message: ChildMessage = {}
        self._read, write = os.pipe()
        os.set_inheritable(write, True)
        self._rest = b""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this object exists
        self._pmi = PmiRelay()
        libc = ctypes.CDLL(None)
        self._process = subprocess.Popen(
            [*command, str(write)],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            close_fds=False,
            env=os.environ | self._pmi.environment,
            # Any end of this process, even by SIGKILL, ends the child. Safe as long as there are no other threads.
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        os.close(write)
        self._pmi.start()

    def listen(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while (left_s := until - time.monotonic()) > 0:
            if self._read < 0:
                time.sleep(left_s)
            elif select.select([self._read], [], [], left_s)[0]:
                chunk = os.read(self._read, 1 << 16)
                if not chunk:
                    os.close(self._read)
                    self._read = -1
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                if lines:
                    self.message = json.loads(lines[-1])

    def is_done(self) -> bool:
        return self._process.poll() is not None and self._read < 0

    def crash(self) -> tuple[str, str] | None:
        """Return a description of the child's crash and its last output, or None if it has not crashed."""
        code = self._process.poll()
        if not code and not self._pmi.abort_requested:
            return None
        how = "MPI_Abort" if not code else signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"crashed ({how} on rank {self._rank})", self.output_tail()

    def output_tail(self) -> str:
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - 4000))
        lines = self._output.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip()][-25:])

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pmi.leave(self._rank)
        self._output.close()
        if self._read >= 0:
            os.close(self._read)


class _CrashReports:
    """Socket through which the parents on the node of rank 0 report crashes to the parent of rank 0."""

    def __init__(self, rank: int) -> None:
        # The process id of the launcher identifies the job. The zero byte makes it an abstract name, without a file.
        self._name = f"\0odc_mpi-doctor-{os.getuid()}-{os.getppid()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        if rank == 0:
            with suppress(OSError):
                self._socket.bind(self._name)

    def write(self, failure: str, output_tail: str) -> None:
        with suppress(OSError):
            self._socket.sendto(json.dumps([failure, output_tail]).encode(), self._name)

    def is_open(self) -> bool:
        """Return True if the parent of rank 0 is on this node and has not closed its socket."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            return other.connect_ex(self._name) == 0

    def read(self) -> tuple[str, str] | None:
        with suppress(OSError, ValueError):
            failure, output_tail = json.loads(self._socket.recv(1 << 16))
            return failure, output_tail
        return None

    def close(self) -> None:
        self._socket.close()

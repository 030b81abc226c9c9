"""Processes beside MPI: a parent that survives the crash of its child, which takes the rank's place in the job.

    parent   `run_in_child` starts the child and hears its news; the parent never starts MPI
    child    `child_main` runs its main function, which tells the news of rank 0: a JSON object in a line each, on a file
             descriptor. The key `doing` says what the child does next, in words; null when all is done

Launchers end all ranks when one of their processes dies, MPICH's with SIGKILL, so

- a parent stays when its child has crashed, until rank 0 has printed the answer,
- it withholds the child's request to abort the job from the launcher (PMI of MPICH and Slurm; not possible with PMIx),
- it tells rank 0's parent of the crash, through a socket if both are on one node.
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
from enum import Enum
from typing import Any

from odc_mpi.errors import UserError
from odc_mpi.runtime.start.pmi import PmiRelay

#: Variables by which launchers tell a process its rank: PMI (MPICH, Slurm), PMIx (Open MPI).
_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
#: Slurm's variable for it, which is set for every task, whether MPI runs in the task or not.
_TASK_VARIABLE = "SLURM_PROCID"
#: Seconds between checks of the child. Open MPI's launcher sends SIGKILL 0.25 s after its SIGTERM.
_POLL_S = 0.03
#: Seconds to wait for news of the failing operation when a crash is reported.
_LAST_MESSAGES_S = 0.1
#: Seconds that a parent stays after its child's crash where it cannot see whether rank 0 still needs it.
_STAY_S = 20.0
#: Seconds that a child may take to end after rank 0's child has ended.
_END_S = 2.0
_PR_SET_PDEATHSIG = 1

#: What a child tells its parent.
ChildMessage = Mapping[str, Any]


def is_launched() -> bool:
    """Tell whether a launcher started this process. Local; does not start MPI."""
    return any(variable in os.environ for variable in _RANK_VARIABLES)


def launched_rank() -> int:
    """Return this process's rank as the launcher tells it, 0 without a launcher. Local; does not start MPI."""
    variables = _RANK_VARIABLES if is_launched() else (_TASK_VARIABLE,)
    told = (os.environ.get(variable, "0") for variable in variables)
    return next((int(rank) for rank in told if rank.isdecimal() and rank != "0"), 0)


class FailureKind(Enum):
    """How a child may fail, in words."""

    CRASHED = "crashed"
    NO_ANSWER = "no answer within"
    ENDED_BY_LAUNCHER = "ended by the launcher"
    ENDED_EARLY = "ended early"


@dataclass(frozen=True)
class Failure:
    """The failure of a child.

    Attributes:
        kind: Its kind.
        description: Of a crash: "SIGSEGV", "exit code 1" or "MPI_Abort"; without an answer: the time limit.
        rank: Of a crash: the rank.
    """

    kind: FailureKind
    description: str = ""
    rank: int | None = None

    def __str__(self) -> str:
        how = self.description if self.rank is None else f"({self.description} on rank {self.rank})"
        return f"{self.kind.value} {how}".rstrip()


@dataclass(frozen=True)
class ChildResult:
    """The end of a child.

    Attributes:
        messages: The last news; empty if there were none.
        failure: Its failure; None if the child finished.
        output_tail: The last lines of the failed child's standard streams.
    """

    messages: ChildMessage
    failure: Failure | None
    output_tail: str

    @property
    def failure_point(self) -> tuple[str, Failure] | None:
        """What the child was doing when it failed, and the failure; None if it had done all."""
        doing = self.messages.get("doing", "starting MPI")
        if self.failure is None and doing is None:
            return None
        return doing or "closing", self.failure or Failure(FailureKind.ENDED_EARLY)

    def print_output_tail(self) -> None:
        """Print the last lines of a child that failed, on standard error."""
        if self.failure:
            print(f"The last lines of the failed process:\n{self.output_tail or '(none)'}", file=sys.stderr, flush=True)


def child_main(main: Callable[[Sequence[str], Callable[[ChildMessage], None]], None]) -> None:
    """Run the main function of a process that `run_in_child` started; an error ends this process alone.

    Not the job: by way of MPI_Abort it would end the parents, which are to tell the answer. Local, but for what the
    function does.

    Args:
        main: Called with the arguments of the command, and with a function that tells the parent news, on rank 0.
    """
    *arguments, descriptor = sys.argv[1:]
    try:
        with os.fdopen(int(descriptor), "w") as out:

            def tell(news: ChildMessage) -> None:
                if launched_rank() == 0:
                    out.write(json.dumps(news) + "\n")
                    out.flush()

            main(arguments, tell)
    except Exception as error:
        traceback.print_exception(error, limit=0 if isinstance(error, UserError) else None)
        sys.stderr.flush()
        os._exit(1)


@contextmanager
def run_in_child(
    command: Sequence[str],
    rank: int,
    deadline_s: float,
    quiet_s: float,
    on_message: Callable[[ChildMessage], object] = lambda news: None,
) -> Iterator[ChildResult]:
    """Run a child in this process's place in the job until it ends. Local; the child communicates.

    Print the answer within the block: the child is ended after the block, which may end the job.

    Args:
        command: The child's command; one argument is added: the file descriptor for news.
        rank: Rank of this process. Rank 0 returns with the answer, other ranks when they are not needed any more.
        deadline_s: Seconds for the whole run; then the child is ended.
        quiet_s: The most seconds between two lines of news on rank 0; then the child is ended.
        on_message: Called on rank 0 with the latest news; lines that arrive together are passed on as one.
    """
    ended = threading.Event()  # by the launcher
    previous = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    notes = _SharedNotes(rank)
    child = _Child(command, rank)
    try:
        if rank == 0:
            yield _until_known(child, notes, ended, deadline_s, quiet_s, on_message)
        else:
            yield _until_not_needed(child, notes, ended, deadline_s + _END_S)
    finally:
        child.end()
        notes.close()
        signal.signal(signal.SIGTERM, previous)


def _until_known(
    child: "_Child",
    notes: "_SharedNotes",
    ended: threading.Event,
    deadline_s: float,
    quiet_s: float,
    on_message: Callable[[ChildMessage], object],
) -> ChildResult:
    deadline, known = time.monotonic() + deadline_s, child.messages
    quiet_until = deadline
    while True:
        child.listen(_POLL_S)
        if child.messages is not known:
            known, quiet_until = child.messages, time.monotonic() + quiet_s
            on_message(known)
        crash = child.crash() or notes.read()
        if crash is not None:
            child.listen(_LAST_MESSAGES_S)
            return ChildResult(child.messages, *crash)
        if child.is_done():
            return ChildResult(child.messages, None, "")
        if ended.is_set():
            return ChildResult(child.messages, Failure(FailureKind.ENDED_BY_LAUNCHER), child.output_tail())
        if time.monotonic() > min(deadline, quiet_until):
            limit_s = quiet_s if quiet_until < deadline else deadline_s
            return ChildResult(child.messages, Failure(FailureKind.NO_ANSWER, f"{limit_s:g} s"), child.output_tail())


def _until_not_needed(child: "_Child", notes: "_SharedNotes", ended: threading.Event, deadline_s: float) -> ChildResult:
    deadline = time.monotonic() + deadline_s
    crash, was_heard = None, False
    while not ended.is_set() and time.monotonic() < deadline:
        child.listen(_POLL_S)
        if crash is None and (crash := child.crash()):
            notes.write(*crash)
            deadline = min(deadline, time.monotonic() + _STAY_S)
        elif crash is None and child.is_done():
            break
        is_heard = notes.is_received()
        if was_heard and not is_heard:
            # Rank 0 has told the answer. If all went well, this rank's child is about to end, too.
            deadline = min(deadline, time.monotonic() + (0.0 if crash else _END_S))
        was_heard = was_heard or is_heard
    return ChildResult(child.messages, crash and crash[0], "")


class _Child:
    """The child process: it has the environment and the launcher connection of this process."""

    def __init__(self, command: Sequence[str], rank: int) -> None:
        self._rank = rank
        self.messages: ChildMessage = {}
        self._read, write = os.pipe()
        os.set_inheritable(write, True)
        self._rest = b""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this object
        self._pmi = PmiRelay()
        libc = ctypes.CDLL(None)
        self._process = subprocess.Popen(
            [*command, str(write)],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            close_fds=False,
            env=os.environ | self._pmi.environment,
            # Whatever ends this process, SIGKILL from the launcher included, ends the child. Safe before any thread.
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        os.close(write)
        self._pmi.start()

    def listen(self, timeout_s: float) -> None:
        """Read the child's news for so many seconds."""
        until = time.monotonic() + timeout_s
        while (left_s := until - time.monotonic()) > 0:
            if self._read < 0:
                time.sleep(left_s)
            elif select.select([self._read], [], [], left_s)[0]:
                self._take(os.read(self._read, 1 << 16))

    def _take(self, chunk: bytes) -> None:
        if not chunk:
            os.close(self._read)
            self._read = -1
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if lines:
            self.messages = json.loads(lines[-1])

    def is_done(self) -> bool:
        """Whether the child has ended and all its news were read."""
        return self._process.poll() is not None and self._read < 0

    def crash(self) -> tuple[Failure, str] | None:
        """Return the child's crash and its last lines; None if it did not crash."""
        code = self._process.poll()
        if not code and not self._pmi.abort_was_asked:
            return None
        how = "MPI_Abort" if not code else signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Failure(FailureKind.CRASHED, how, self._rank), self.output_tail()

    def output_tail(self) -> str:
        """Return the last lines of the child's standard streams."""
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - 4000))
        lines = self._output.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip()][-25:])

    def end(self) -> None:
        """Kill the child if it still runs."""
        self._process.kill()
        self._process.wait()
        self._pmi.leave(self._rank)
        self._output.close()
        if self._read >= 0:
            os.close(self._read)


class _SharedNotes:
    """A socket by which the parents of one node report a crash to rank 0's; named by their launcher's process id."""

    def __init__(self, rank: int) -> None:
        # The zero makes it a name without a file: nothing stays behind.
        self._name = f"\0odc_mpi-doctor-{os.getuid()}-{os.getppid()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        if rank == 0:
            with suppress(OSError):
                self._socket.bind(self._name)

    def write(self, crash: Failure, output_tail: str) -> None:
        """Report a crash to rank 0's parent, if it is on this node."""
        with suppress(OSError):
            self._socket.sendto(json.dumps([crash.description, crash.rank, output_tail]).encode(), self._name)

    def is_received(self) -> bool:
        """Whether rank 0's parent is on this node and still listens."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            return other.connect_ex(self._name) == 0

    def read(self) -> tuple[Failure, str] | None:
        """Return the crash that another parent reported, None if there is none."""
        with suppress(OSError, ValueError):
            how, rank, last_words = json.loads(self._socket.recv(1 << 16))
            return Failure(FailureKind.CRASHED, how, rank), last_words
        return None

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

"""Processes beside MPI: a parent that survives the crash of its child, which takes the rank's place in the job.

`take_part` starts the child; the parent never starts MPI. Launchers end all ranks when one of their processes dies,
MPICH's with SIGKILL, so

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
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

#: Variables by which launchers tell a process its rank: PMI (MPICH, Slurm), PMIx (Open MPI).
_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
#: Slurm's variable for it, which is set for every task, whether MPI runs in the task or not.
_TASK_VARIABLE = "SLURM_PROCID"
#: Seconds between checks of the child. Open MPI's launcher sends SIGKILL 0.25 s after its SIGTERM.
_LOOK_S = 0.03
#: Seconds to wait for news of the failing operation when a crash is reported.
_LAST_NEWS_S = 0.1
#: Seconds that a parent stays after its child's crash where it cannot see whether rank 0 still needs it.
_STAY_S = 20.0
#: Seconds for the launcher to forward printed lines before it is asked to end the job.
_FORWARD_S = 0.2
#: Seconds that a child may take to end after rank 0's child has ended.
_END_S = 2.0
_PR_SET_PDEATHSIG = 1
#: The failure of a child that neither crashed nor finished.
ENDED_BY_LAUNCHER = "ended by the launcher"
#: How a failure begins that is a time-out.
NO_ANSWER = "no answer within"


def is_launched() -> bool:
    """Tell whether a launcher started this process. Local; does not start MPI."""
    return any(variable in os.environ for variable in _RANK_VARIABLES)


def launched_rank() -> int:
    """Return this process's rank as the launcher tells it, 0 without a launcher. Local; does not start MPI."""
    variables = _RANK_VARIABLES if is_launched() else (_TASK_VARIABLE,)
    told = (os.environ.get(variable, "0") for variable in variables)
    return next((int(rank) for rank in told if rank.isdecimal() and rank != "0"), 0)


@dataclass(frozen=True)
class Ending:
    """The end of a child.

    Attributes:
        news: The last line of news, decoded; None if there was none.
        failure: The failure in words, such as "crashed (SIGSEGV on rank 1)"; None if the child finished.
        last_words: The last lines of the failed child's standard streams.
    """

    news: Any
    failure: str | None
    last_words: str


@contextmanager
def take_part(
    command: Sequence[str],
    rank: int,
    deadline_s: float,
    quiet_s: float,
    hear: Callable[[Any], object] = lambda news: None,
) -> Iterator[Ending]:
    """Run a child in this process's place in the job until it ends. Local; the child communicates.

    Print the answer within the block: the child is ended after the block, which may end the job.

    Args:
        command: The child's command; one argument is added: the file descriptor for news, a JSON object per line.
        rank: Rank of this process. Rank 0 returns with the answer, other ranks when they are not needed any more.
        deadline_s: Seconds for the whole run; then the child is ended.
        quiet_s: The most seconds between two lines of news on rank 0; then the child is ended.
        hear: Called on rank 0 with the latest news; lines that arrive together are passed on as one.
    """
    ended = threading.Event()  # by the launcher
    previous = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    notes = _Notes(rank)
    child = _Child(command, rank)
    try:
        if rank == 0:
            yield _until_known(child, notes, ended, deadline_s, quiet_s, hear)
        else:
            yield _until_not_needed(child, notes, ended, deadline_s + _END_S)
    finally:
        child.end()
        notes.close()
        signal.signal(signal.SIGTERM, previous)


def _until_known(
    child: "_Child",
    notes: "_Notes",
    ended: threading.Event,
    deadline_s: float,
    quiet_s: float,
    hear: Callable[[Any], object],
) -> Ending:
    deadline, known = time.monotonic() + deadline_s, None
    quiet_until = deadline
    while True:
        child.listen(_LOOK_S)
        if child.news is not known:
            known, quiet_until = child.news, time.monotonic() + quiet_s
            hear(known)
        crash = child.crash() or notes.read()
        if crash is not None:
            child.listen(_LAST_NEWS_S)
            return Ending(child.news, *crash)
        if child.is_done():
            return Ending(child.news, None, "")
        if ended.is_set():
            return Ending(child.news, ENDED_BY_LAUNCHER, child.last_words())
        if time.monotonic() > min(deadline, quiet_until):
            limit_s = quiet_s if quiet_until < deadline else deadline_s
            return Ending(child.news, f"{NO_ANSWER} {limit_s:g} s", child.last_words())


def _until_not_needed(child: "_Child", notes: "_Notes", ended: threading.Event, deadline_s: float) -> Ending:
    deadline = time.monotonic() + deadline_s
    crash, was_heard = None, False
    while not ended.is_set() and time.monotonic() < deadline:
        child.listen(_LOOK_S)
        if crash is None and (crash := child.crash()):
            notes.write(*crash)
            deadline = min(deadline, time.monotonic() + _STAY_S)
        elif crash is None and child.is_done():
            break
        is_heard = notes.is_heard()
        if was_heard and not is_heard:
            # Rank 0 has told the answer. If all went well, this rank's child is about to end, too.
            deadline = min(deadline, time.monotonic() + (0.0 if crash else _END_S))
        was_heard = was_heard or is_heard
    return Ending(child.news, crash and crash[0], "")


class _Child:
    """The child process: it has the environment and the launcher connection of this process."""

    def __init__(self, command: Sequence[str], rank: int) -> None:
        self._rank = rank
        self.news: Any = None
        self._read, write = os.pipe()
        os.set_inheritable(write, True)
        self._rest = b""
        self._noise = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this object
        self._pmi = _PmiRelay()
        libc = ctypes.CDLL(None)
        self._process = subprocess.Popen(
            [*command, str(write)],
            stdin=subprocess.DEVNULL,
            stdout=self._noise,
            stderr=self._noise,
            close_fds=False,
            env=os.environ | self._pmi.environment,
            # Whatever ends this process, SIGKILL from the launcher included, ends the child. Safe before any thread.
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        os.close(write)
        self._pmi.start()

    def listen(self, timeout_s: float) -> None:
        """Read the child's news for so many seconds. Local."""
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
            self.news = json.loads(lines[-1])

    def is_done(self) -> bool:
        """Whether the child has ended and all its news were read. Local."""
        return self._process.poll() is not None and self._read < 0

    def crash(self) -> tuple[str, str] | None:
        """Return the child's crash in words and its last lines; None if it did not crash. Local."""
        code = self._process.poll()
        if not code and not self._pmi.abort_was_asked:
            return None
        how = "MPI_Abort" if not code else signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"crashed ({how} on rank {self._rank})", self.last_words()

    def last_words(self, num_lines: int = 25) -> str:
        """Return the last lines of the child's standard streams. Local."""
        self._noise.seek(max(0, self._noise.seek(0, os.SEEK_END) - 4000))
        lines = self._noise.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip()][-num_lines:])

    def end(self) -> None:
        """Kill the child if it still runs. Local."""
        self._process.kill()
        self._process.wait()
        self._pmi.leave(self._rank)
        self._noise.close()
        if self._read >= 0:
            os.close(self._read)


class _PmiRelay:
    """Stands between the child and a launcher that speaks PMI over a socket, and swallows requests to abort the job.

    Each message of either version of PMI is written at once and answered before the next. PMIx does without: there the
    environment stays as it is.
    """

    def __init__(self) -> None:
        self.abort_was_asked = False
        self.environment: dict[str, str] = {}
        self._is_open = False
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        with suppress(ValueError, OSError):
            self._launcher = int(os.environ.get("PMI_FD", ""))
            os.set_inheritable(self._launcher, False)
            self._sockets = socket.socketpair()
            self._sockets[1].set_inheritable(True)
            self.environment = {"PMI_FD": str(self._sockets[1].fileno())}

    def start(self) -> None:
        """Begin to relay, once the child has its end of the connection. Local."""
        if self._sockets is not None:
            self._sockets[1].close()
            child = self._sockets[0].fileno()
            for source, sink in ((child, self._launcher), (self._launcher, child)):
                threading.Thread(target=self._relay, args=(source, sink), daemon=True).start()

    def leave(self, rank: int) -> None:
        """Close the PMI connection in order if the child could not; else the launcher reports a failure. Local."""
        if not self._is_open:
            return
        message = b"cmd=finalize\n"
        if rank == 0 and os.environ.get("MPI_LOCALNRANKS") != os.environ.get("PMI_SIZE"):
            # Ranks on other nodes do not see that they are no longer needed.
            message = b"cmd=abort exitcode=0\n"
            time.sleep(_FORWARD_S)
        with suppress(OSError):
            os.write(self._launcher, message)

    def _relay(self, source: int, sink: int) -> None:
        with suppress(OSError):  # the other side has ended
            while message := os.read(source, 1 << 16):
                if source == self._launcher:
                    os.write(sink, message)
                elif b"cmd=abort" in message:
                    self.abort_was_asked = True
                else:
                    self._follow(message)
                    os.write(sink, message)

    def _follow(self, message: bytes) -> None:
        if message.startswith(b"cmd=init pmi_version=1 "):
            self._is_open = True
        elif message.startswith(b"cmd=finalize"):
            self._is_open = False


class _Notes:
    """A socket by which the parents of one node report a crash to rank 0's; named by their launcher's process id."""

    def __init__(self, rank: int) -> None:
        # The zero makes it a name without a file: nothing stays behind.
        self._name = f"\0odc_mpi-doctor-{os.getuid()}-{os.getppid()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        if rank == 0:
            with suppress(OSError):
                self._socket.bind(self._name)

    def write(self, how: str, last_words: str) -> None:
        """Report a crash to rank 0's parent, if it is on this node. Local."""
        with suppress(OSError):
            self._socket.sendto(json.dumps([how, last_words]).encode(), self._name)

    def is_heard(self) -> bool:
        """Whether rank 0's parent is on this node and still listens. Local."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            return other.connect_ex(self._name) == 0

    def read(self) -> tuple[str, str] | None:
        """Return the crash that another parent reported, None if there is none. Local."""
        with suppress(OSError, ValueError):
            how, last_words = json.loads(self._socket.recv(1 << 16))
            return how, last_words
        return None

    def close(self) -> None:
        """Stop listening. Local."""
        self._socket.close()

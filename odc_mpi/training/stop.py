"""Requests to stop a run by a signal to any rank, for example from Ctrl-C or from a scheduler before the time limit."""

import ctypes
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from odc_mpi.observe.callback import Callback, Step
from odc_mpi.runtime.start.launch import launched_rank

if TYPE_CHECKING:
    from odc_mpi.shard.minibatch_stats import MinibatchStats

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_INTERRUPTED = b"odc_mpi: interrupted; saving after this step. Press Ctrl-C again to end at once\n"
_OPEN_MPI = (
    b"odc_mpi: mpiexec of Open MPI ends the ranks 0.25 s after Ctrl-C, SIGTERM or the end of a rank, before they can "
    b"save: to save and stop, send SIGUSR1 to mpiexec. The same command resumes from the newest checkpoint\n"
)
#: srun kills the ranks some milliseconds after it forwarded Ctrl-C, so this is printed at the start.
_SRUN = b"odc_mpi: Ctrl-C ends this run without a checkpoint: to save and stop, send SIGUSR1 to srun\n"
#: Seconds after the first signal during which others are ignored, because a launcher may forward the same signal.
REPEAT_S = 1.0


class StopRequest(Callback):
    """Context manager that handles `SIGNALS`. The first signal sets `requested`; a later one ends this process.

    Signals within `REPEAT_S` seconds of the first are ignored. Outside the main thread, where Python does not allow
    signal handlers, no signals are handled. As a callback, the object sets `requested_on_any_rank` on all ranks.
    """

    gathered_names = ("stop",)

    def __init__(self) -> None:
        self.requested = self.requested_on_any_rank = False
        self._received, self._closed = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._exit_on_next_signal, name="odc_mpi-stop", daemon=True)
        self._pid = os.getpid()
        self._previous_handlers: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            # Not in the handler: it may interrupt the start of another thread, which holds a lock.
            self._watcher.start()
            _print_how_to_stop()
            self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._received.set()
        if self._previous_handlers:
            self._watcher.join()
        for number, before in self._previous_handlers.items():
            signal.signal(number, before)  # type: ignore[arg-type]
        self._previous_handlers = {}

    def poll_stop_file(self) -> None:
        """Set `requested` if the file `$ODC_MPI_STOP_FILE` exists. Batch scripts create it when they get a signal."""
        path = os.environ.get("ODC_MPI_STOP_FILE")
        self.requested = self.requested or bool(path and Path(path).exists())

    def local_values(self) -> tuple[float]:
        """Return a one-element tuple: 1 if this rank has received a request, otherwise 0."""
        return (float(self.requested),)

    def on_gathered(self, step: Step, gathered: "MinibatchStats") -> None:
        """Set `requested_on_any_rank` to True if `requested` was True on any rank."""
        self.requested_on_any_rank = gathered.sum("stop") > 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked worker. A scheduler may send SIGUSR1 to all processes; the others end it, as Process.terminate.
            if number != signal.SIGUSR1:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if not self.requested and number != signal.SIGUSR1:
            _print_notice(number)
        self.requested = True
        self._received.set()

    def _exit_on_next_signal(self) -> None:
        """After the first signal, restore the default action, which ends this process even inside MPI or torch."""
        self._received.wait()
        if not self._closed.wait(REPEAT_S):
            # A repeated request is urgent; the launcher ends the other ranks. `signal.signal` works only in the main
            # thread.
            libc = ctypes.CDLL(None)
            libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
            for number in SIGNALS:
                libc.signal(number, None)  # SIG_DFL


def _print_how_to_stop() -> None:
    """Print on rank 0 how to stop a run that a user started by srun. `odc-mpi run` sets `ODC_MPI_STOPPED_FILE`."""
    by_srun = "SLURM_STEP_ID" in os.environ and "MPI_LOCALNRANKS" not in os.environ  # not by MPICH's mpiexec
    if by_srun and "ODC_MPI_STOPPED_FILE" not in os.environ and launched_rank() == 0:
        os.write(2, _SRUN)


def _print_notice(number: int) -> None:
    """Print on rank 0 how the run ends. Safe in a signal handler, where `print` could interrupt another `print`."""
    ends_at_once = "PRTE_LAUNCHED" in os.environ  # by mpiexec of Open MPI; srun lets the ranks finish
    with suppress(OSError):
        if launched_rank() == 0 and ends_at_once:
            # Open MPI's mpiexec does not forward the ranks' output from now on.
            terminal = os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY)
            os.write(terminal, _OPEN_MPI)
            os.close(terminal)
        elif launched_rank() == 0 and number == signal.SIGINT:
            os.write(2, _INTERRUPTED)

"""Request to stop a run: SIGTERM or SIGUSR1 to any rank, which a scheduler sends before the time limit."""

import ctypes
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from odc_mpi.observe.callback import Callback, Step

if TYPE_CHECKING:
    from odc_mpi.shard import model as sharded

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
#: Signals within this time after the first are duplicates: a launcher may also forward one that ranks got directly.
REPEAT_S = 1.0


class StopRequest(Callback):
    """Handles `SIGNALS` while it is entered as a context: the first requests a stop, a later one ends this process.

    As a callback it makes the request of one rank that of all. Outside the main thread, where Python allows no signal
    handlers, it handles no signals.

    Attributes:
        requested: True after this rank received a request.
        requested_on_any_rank: True if any rank had when the gradients were complete; the same on every rank.
    """

    gathered_names = ("stop",)

    def __init__(self) -> None:
        self.requested = self.requested_on_any_rank = False
        self._received, self._closed = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._exit_on_next_signal, name="odc_mpi-stop", daemon=True)
        self._previous_handlers: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            # Not in the handler: it may interrupt the start of another thread, which holds a lock.
            self._watcher.start()
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
        """Check for the file that a batch script writes because its signal may come before the ranks exist."""
        path = os.environ.get("ODC_MPI_STOP_FILE")
        self.requested = self.requested or bool(path and Path(path).exists())

    def local_values(self) -> tuple[float]:
        """Return `requested` as a number."""
        return (float(self.requested),)

    def on_gathered(self, step: Step, gathered: "sharded.MinibatchStats") -> None:
        """Set `requested_on_any_rank`."""
        self.requested_on_any_rank = gathered.sum("stop") > 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._received.set()

    def _exit_on_next_signal(self) -> None:
        """Restore the default action of `SIGNALS`, which ends this process at once, even inside MPI or torch."""
        self._received.wait()
        if not self._closed.wait(REPEAT_S):
            # A repeated request is urgent; the launcher ends the other ranks. `signal.signal` works in the main
            # thread only.
            libc = ctypes.CDLL(None)
            libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
            for number in SIGNALS:
                libc.signal(number, None)  # SIG_DFL

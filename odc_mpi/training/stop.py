"""A wish to stop, as a scheduler tells it before the time is up: SIGTERM or SIGUSR1, to any rank."""

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
#: What comes so soon after the first is the same once more: a launcher passes on what ranks were told directly, too.
REPEAT_S = 1.0


class StopRequest(Callback):
    """Hears the first of these signals as a wish, while it is a context; a later one ends this process.

    As a participant it makes one rank's wish that of all.

    Only the main thread can hear signals: in another, nothing is changed.

    Attributes:
        requested: Whether this rank was told to stop.
        requested_on_any_rank: Whether any rank was when all met at point A; the same on every rank.
    """

    gathered_names = ("stop",)

    def __init__(self) -> None:
        self.requested = self.requested_on_any_rank = False
        self._received, self._closed = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._exit_on_next_signal, name="odc_mpi-stop", daemon=True)
        self._previous_handlers: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            # Not in the handler: it may interrupt a start of another thread, which holds the lock for that.
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
        """Hear the wish also from the file that a batch script leaves where its signal may find no ranks yet."""
        path = os.environ.get("ODC_MPI_STOP_FILE")
        self.requested = self.requested or bool(path and Path(path).exists())

    def local_values(self) -> tuple[float]:
        """Return whether this rank was told to stop."""
        return (float(self.requested),)

    def on_gathered(self, step: Step, gathered: "sharded.MinibatchStats") -> None:
        """Learn whether any rank was."""
        self.requested_on_any_rank = gathered.sum("stop") > 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._received.set()

    def _exit_on_next_signal(self) -> None:
        """Have the kernel end this process at the next signal, which does not wait until MPI or torch return."""
        self._received.wait()
        if not self._closed.wait(REPEAT_S):
            # Whoever tells it again does not want to wait; a launcher ends the other ranks. Python's own call for
            # that is for the main thread only.
            libc = ctypes.CDLL(None)
            libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
            for number in SIGNALS:
                libc.signal(number, None)  # SIG_DFL

"""A wish to stop, as a scheduler tells it before the time is up: SIGTERM or SIGUSR1, to any rank."""

import ctypes
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from odc_mpi.observe.participant import Participant, Step

if TYPE_CHECKING:
    from odc_mpi.shard import model as sharded

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
#: What comes so soon after the first is the same once more: a launcher passes on what ranks were told directly, too.
REPEAT_S = 1.0


class StopWish(Participant):
    """Hears the first of these signals as a wish, while it is a context; a later one ends this process. Local.

    As a participant it makes one rank's wish that of all.

    Only the main thread can hear signals: in another, nothing is changed.

    Attributes:
        told: Whether this rank was told to stop.
        agreed: Whether any rank was when all met at point A; the same on every rank.
    """

    names = ("stop",)

    def __init__(self) -> None:
        self.told = self.agreed = False
        self._heard, self._over = threading.Event(), threading.Event()
        self._waiting = threading.Thread(target=self._await_the_next, name="odc_mpi-stop", daemon=True)
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopWish":
        if threading.current_thread() is threading.main_thread():
            # Not in the handler: it may interrupt a start of another thread, which holds the lock for that.
            self._waiting.start()
            self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._heard.set()
        if self._before:
            self._waiting.join()
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]
        self._before = {}

    def look(self) -> None:
        """Hear the wish also from the file that a batch script leaves where its signal may find no ranks yet. Local."""
        path = os.environ.get("ODC_MPI_STOP_FILE")
        self.told = self.told or bool(path and Path(path).exists())

    def tell(self) -> tuple[float]:
        """Return whether this rank was told to stop. Local."""
        return (float(self.told),)

    def hear(self, step: Step, told: "sharded.Minibatch") -> None:
        """Learn whether any rank was. Local."""
        self.agreed = told.total("stop") > 0

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.told = True
        self._heard.set()

    def _await_the_next(self) -> None:
        """Have the kernel end this process at the next signal, which does not wait until MPI or torch return."""
        self._heard.wait()
        if not self._over.wait(REPEAT_S):
            # Whoever tells it again does not want to wait; a launcher ends the other ranks. Python's own call for
            # that is for the main thread only.
            libc = ctypes.CDLL(None)
            libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
            for number in SIGNALS:
                libc.signal(number, None)  # SIG_DFL

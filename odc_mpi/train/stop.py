"""A wish to stop, as a scheduler tells it before the time is up: SIGTERM or SIGUSR1, to any rank."""

import os
import signal
import threading
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
#: What comes so soon after the first is the same once more: a launcher passes on what ranks were told directly, too.
REPEAT_S = 1.0


class StopWish:
    """Hears the first of these signals as a wish, while it is a context; a later one ends this process. Local.

    Only the main thread can hear signals: in another, nothing is changed.

    Attributes:
        told: Whether this rank was told to stop.
    """

    def __init__(self) -> None:
        self.told = False
        self._told_at = 0.0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopWish":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]
        self._before = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.told:
            self.told, self._told_at = True, now
        elif now - self._told_at > REPEAT_S:
            # Whoever tells it again does not want to wait; a launcher ends the other ranks.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

"""A wish to stop, as a scheduler tells it before the time is up: SIGTERM or SIGUSR1, to any rank."""

import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopWish:
    """Hears the first of these signals as a wish, while it is a context; the next ends this process. Local.

    Only the main thread can hear signals: in another, nothing is changed.

    Attributes:
        told: Whether this rank was told to stop.
    """

    def __init__(self) -> None:
        self.told = False
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
        self.told = True
        # Whoever tells it twice does not want to wait; a launcher ends the other ranks.
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)

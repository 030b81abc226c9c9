"""Limits for what no thread of ours can watch: MPI's own start and its own end.

MPI_Init runs while Python code is imported and holds its lock, MPI_Finalize when there is no interpreter any more.
Should one of them hang, because a rank was stopped there, the kernel ends this process with SIGALRM. A launcher that
sees a rank killed by a signal ends all others. Nothing here knows MPI.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Seconds for MPI to start, unless ODC_MPI_START_TIMEOUT_S says otherwise: thousands of ranks may take minutes.
START_S = 300.0
#: Seconds for MPI to end, at least: on a crowded machine that takes some.
END_S = 10.0


@contextmanager
def start_limit() -> Iterator[None]:
    """End this process if the enclosed start of MPI takes too long. Local; in the main thread."""
    before = _arm(_start_s())
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def end_within(seconds: float) -> None:
    """End this process if it has not ended by itself in time, or in `END_S`. Local; the main thread only may."""
    if threading.current_thread() is threading.main_thread():
        _arm(max(seconds, END_S))


def end_by_interrupt() -> None:
    """End this process as an interrupt does that nobody catches: a launcher then ends the other ranks."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _arm(seconds: float) -> signal.Handlers:
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # The kernel counts in 64 bits; a limit of a year is none, and no error.
    signal.setitimer(signal.ITIMER_REAL, min(seconds, 3e7))
    return before  # type: ignore[return-value]


def _start_s() -> float:
    try:
        seconds = float(os.environ.get("ODC_MPI_START_TIMEOUT_S", START_S))
    except ValueError:
        return START_S
    return seconds if seconds > 0 else START_S
